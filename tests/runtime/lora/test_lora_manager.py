from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.bench.load_clients import simulated_stream
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.lora.adapter import Adapter, LowRank, simulated_shift
from hearth.runtime.lora.lora_manager import SLOTS, LoRAManager
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.tensors.lora import RANK, lora_inputs
from hearth.runtime.tensors.tensor import Tensor
from tests.low_rank_models import Adapter as Pairs
from tests.low_rank_models import engine_inputs, random_adapter
from tests.peft_models import write_peft
from tests.runtime.lora.adapter_configs import BASE, adapter_config

NONE: Pairs = {}
FIRST = random_adapter(BASE, 8)
SECOND = random_adapter(BASE, 3, targets="q v up", seed=1)
REBINDS = adapter_config()
# What a plan takes.
STATIC = adapter_config(backend="tensorrt")
KERNELS = adapter_config(9, backend="kernels")
JOINED = structs.replace(STATIC, lora_targets=("qkv", "o", "gate_up", "down"))


def manager(config: LLMEngineRunnerConfig) -> LoRAManager:
    made = LoRAManager(config, CpuDevice(), Tensor.zeros("zeros", (64,), np.dtype(np.float32)))
    for name, pairs, rank in (("first", FIRST, 8), ("second", SECOND, 3)):
        parts = {place: LowRank(*part) for place, part in pairs.items()}
        made.load(name, Adapter(rank, "", name, parts))
    return made


def check(found: LoRAManager, config: LLMEngineRunnerConfig, pairs: Pairs) -> None:
    """What a step binds is what an engine wants of these pairs."""
    bound = {name: tensor.array.copy() for name, tensor in found.bindings(found.active).items()}
    for name, wanted in engine_inputs(config, pairs).items():
        got = bound.pop(name)
        if got.shape == wanted.shape:
            assert np.array_equal(got, wanted), name
        else:
            # Where targets are joined the places of their ranks are free.
            assert got.shape[0 if "_b_" in name else 1] == wanted.shape[0 if "_b_" in name else 1]
    bound.pop(RANK, None)
    assert not bound


@pytest.mark.parametrize("config", [REBINDS, STATIC])
def test_steps_bind_what_the_engine_wants(config: LLMEngineRunnerConfig) -> None:
    found = manager(config)
    check(found, config, NONE)
    for name, pairs in (("second", SECOND), ("first", FIRST), ("", NONE), ("second", SECOND)):
        found.switch(name)
        assert found.active == name
        check(found, config, pairs)


def test_targets_of_one_input_lie_side_by_side() -> None:
    found = manager(JOINED)
    found.switch("second")
    bound = found.bindings("second")
    a, b = bound["lora_a_qkv_1"].array, bound["lora_b_qkv_1"].array
    x = np.random.default_rng(0).standard_normal((1, a.shape[0])).astype(np.float32)
    q, v = (x @ SECOND[1, one][0] @ SECOND[1, one][1] for one in "qv")
    assert a.shape[1] == 3 * JOINED.max_supported_lora_rank
    assert np.allclose(x @ a @ b, np.concatenate((q, np.zeros_like(v), v), -1), atol=1e-6)


@pytest.mark.parametrize("config", [STATIC, JOINED])
def test_static_addresses_stay_and_blocks_are_used_again(config: LLMEngineRunnerConfig) -> None:
    found = manager(config)
    addresses = {name: one.address for name, one in found.bindings("").items()}
    assert len(set(addresses.values())) == len(addresses)
    assert all(address % 8 == 0 for address in addresses.values())
    block = found._loaded["first"].block
    for name in ("first", "second", ""):
        found.switch(name)
        assert found.bound == ""
        assert {key: one.address for key, one in found.bindings(name).items()} == addresses
    found.unload("first")
    found.load("third", Adapter(3, "", "", {place: LowRank(*one) for place, one in SECOND.items()}))
    assert found._loaded["third"].block is block
    found.switch("third")
    third = {name: one.array.copy() for name, one in found.bindings("third").items()}
    found.switch("second")
    assert all(np.array_equal(one.array, third[n]) for n, one in found.bindings("second").items())


def test_a_digest_is_that_of_the_numbers(tmp_path: Path) -> None:
    found = manager(REBINDS)
    for name, seed in (("same", 0), ("again", 0), ("other", 5)):
        found.load(name, write_peft(BASE, tmp_path / name, seed=seed))
    digests = {name: found.digest(name) for name in ("first", "same", "again", "other", "")}
    assert digests["same"] == digests["again"]
    assert len({*digests.values()}) == 4
    assert (digests["first"], digests[""]) == ("first", "")


@pytest.mark.parametrize("config", [REBINDS, STATIC])
def test_names_are_known_once(config: LLMEngineRunnerConfig) -> None:
    found = manager(config)
    assert found.available == ["first", "second"]
    refusals: list[tuple[Any, str]] = [
        (lambda: found.load("first", Adapter(1, "", "", {})), "invalid_value"),
        (lambda: found.load("", Adapter(1, "", "", {})), "invalid_value"),
        (lambda: found.switch("third"), "adapter_unknown"),
        (lambda: found.unload("third"), "adapter_unknown"),
        (lambda: found.digest("third"), "adapter_unknown"),
    ]
    for refused, code in refusals:
        with pytest.raises(HearthError) as caught:
            refused()
        assert (caught.value.code, caught.value.field) == (code, "adapter")
    found.switch("second")
    with pytest.raises(HearthError, match="is active"):
        found.unload("second")


@pytest.mark.parametrize("config", [REBINDS, STATIC])
def test_one_that_finds_no_memory_is_refused(
    config: LLMEngineRunnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = manager(config)
    found.unload("second")
    left = list(found._free)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("hearth.runtime.lora.lora_manager.BlockLayout.filled", full)
        with pytest.raises(HearthError) as caught:
            found.load("third", Adapter(8, "", "third", {}))
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "adapter")
    assert (found.available, found._free) == (["first"], left)


def test_kernels_bind_slots_and_a_rank_while_an_adapter_is_active() -> None:
    found = manager(KERNELS)
    none, slots = found.bindings(""), found.bindings(SLOTS)
    assert found.sets == {"", SLOTS}
    assert {one.shape[1] for name, one in none.items() if "_a_" in name} == {0}
    assert none[RANK].array.tolist() == [0]
    for name, rank, bound in (("second", 3, SLOTS), ("", 0, ""), ("first", 8, SLOTS)):
        found.switch(name)
        assert found.bound == bound
        assert found.bindings(name)[RANK].array.tolist() == [rank]
        assert found.bindings(found.bound) is found.bindings(name)
        assert slots[RANK].array.tolist() == [rank]
    check(found, KERNELS, FIRST)
    assert all(pair.rank % 16 == 0 for pair in lora_inputs(KERNELS))


REFERENCE = Path(__file__).parents[2] / "references" / "qwen3"


def test_tokens_follow_from_the_adapter_that_is_bound(tmp_path: Path) -> None:
    options = ExportOptions(capacity=64, max_batch=2, max_lora_rank=2)
    export_model(REFERENCE, tmp_path / "engine", options)
    simulated = RuntimeOptions(engine_kind="simulated")
    with closing(LLMInferenceRuntime.open(tmp_path / "engine", simulated)) as runtime:
        for name in ("a", "b"):
            # Nothing is read of an adapter but its name.
            runtime.load_adapter(name, tmp_path)
        for name in ("", "a", "b", "a", ""):
            asked = RequestOptions(max_tokens=5, adapter=name)
            row = RowRequest(token_ids=[3, 4], prompt_length=2, options=asked)
            given = runtime.handle_request(GenerationRequest(rows=[row])).rows[0].token_ids
            assert given == simulated_stream(runtime.config, [3, 4], 5, name)
        with pytest.raises(HearthError) as caught:
            runtime.switch_adapter("c")
        assert caught.value.code == "adapter_unknown"


def test_names_differ_and_none_is_nothing() -> None:
    assert simulated_shift("") == 0
    assert len({simulated_shift(name) for name in ("", "a", "b", "adapter-0", "adapter-1")}) == 5
