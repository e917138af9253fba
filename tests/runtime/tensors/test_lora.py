from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import LORA_JOINED, LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import IOTensor
from hearth.runtime.executor.engine_executor import check_bindings, check_known
from hearth.runtime.tensors.lora import has_fixed_rank, lora_inputs, lora_targets
from hearth.runtime.tensors.registry import TensorRegistry, build_registry_for_llm
from tests.runtime.engine_configs import small_config

PLAN = {"device": "cuda", "backend": "tensorrt", "static_decode_batches": (1, 2)}


def _config(**changes: Any) -> LLMEngineRunnerConfig:
    config = structs.replace(small_config(), max_supported_lora_rank=8, **changes)
    return structs.replace(config, lora_targets=lora_targets(config))


def test_every_product_has_a_pair_of_any_rank_on_a_cpu() -> None:
    config = _config()
    pairs = lora_inputs(config)
    assert not has_fixed_rank(config)
    assert [pair.a for pair in pairs[:4]] == [
        "lora_a_qkv_0", "lora_a_o_0", "lora_a_gate_up_0", "lora_a_down_0"
    ]  # fmt: skip
    assert len(pairs) == 4 * config.num_decoder_layers
    first, output = pairs[:2]
    heads = config.num_attention_heads + 2 * config.num_kv_heads
    assert (first.b, first.layer, first.targets) == ("lora_b_qkv_0", 0, ("q", "k", "v"))
    assert first.shape_a == (config.hidden_size, "lora_rank_qkv_0")
    assert first.shape_b == ("lora_rank_qkv_0", heads * config.head_dim)
    assert output.shape_b == ("lora_rank_o_0", config.hidden_size)
    # One symbol for two pairs would tell ONNX Runtime that they have one rank.
    assert len({pair.shape_a[1] for pair in pairs}) == len(pairs)


def test_a_captured_step_has_pairs_of_the_greatest_rank() -> None:
    config = _config(**PLAN)
    assert config.lora_targets == ("qkv", "o", "gate_up", "down")
    for pair in lora_inputs(config):
        assert pair.rank == 8 * len(pair.targets)
        assert pair.shape_a == (pair.inputs, pair.rank)
        assert pair.shape_b == (pair.rank, sum(pair.outputs))


@pytest.mark.parametrize("changes", [{}, PLAN], ids=str)
def test_what_nobody_asks_for_has_no_pair(changes: dict[str, Any]) -> None:
    config = _config(**changes)
    assert lora_targets(config, ("up", "q", "gate", "v")) == ("qkv", "gate_up")
    config = structs.replace(config, lora_targets=lora_targets(config, ["o"]))
    assert [pair.a for pair in lora_inputs(config)] == ["lora_a_o_0", "lora_a_o_1"]


def test_targets_lie_side_by_side() -> None:
    config = _config(**PLAN)
    pair = lora_inputs(config)[0]
    query = config.num_attention_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    assert pair.targets == LORA_JOINED["qkv"]
    assert pair.columns == (
        slice(0, query),
        slice(query, query + keys),
        slice(query + keys, query + 2 * keys),
    )


def test_an_engine_without_adapters_has_no_inputs_for_them() -> None:
    assert lora_targets(small_config()) == ()
    assert lora_inputs(small_config()) == ()
    assert build_registry_for_llm(small_config()).own_specs == ()


def _io(registry: TensorRegistry) -> list[IOTensor]:
    specs = (*registry.specs, *registry.own_specs)
    return [IOTensor(one.name, one.direction, one.dtype, one.shape) for one in specs]


def test_an_engine_is_compared_with_the_inputs_that_it_must_have() -> None:
    registry = build_registry_for_llm(_config())
    assert registry.get("lora_a_qkv_0") is None  # Its tensor's own shape is bound.
    check_bindings(_io(registry), registry)
    check_known(_io(registry), registry)
    with pytest.raises(HearthError, match="unknown"):
        check_known(_io(registry), build_registry_for_llm(small_config()))
    lacking = [one for one in _io(registry) if one.name != "lora_b_down_1"]
    with pytest.raises(HearthError) as caught:
        check_bindings(lacking, registry)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "lora_b_down_1")
    wide = build_registry_for_llm(_config(intermediate_size=96))
    with pytest.raises(HearthError) as caught:
        check_bindings(_io(wide), registry)
    assert caught.value.field == "lora_b_gate_up_0"
