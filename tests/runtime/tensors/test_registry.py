from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.tensors.profiles import InferenceDims, TowerDims
from hearth.runtime.tensors.registry import (
    TensorRegistry,
    TensorSpec,
    build_registry_for_llm,
    build_registry_for_tower,
    build_tower_profiles,
    index_dtype,
)
from tests.runtime.vision.tower_config import config_of

FLOAT = np.dtype(np.float32)
DIMS = InferenceDims.prefill(2, 5, 256)


def test_a_shape_follows_from_the_dims() -> None:
    spec = TensorSpec("logits", "output", FLOAT, ("batch", "select_len", 7))
    assert spec.resolve(DIMS) == (2, 1, 7)


def test_a_member_that_is_not_positive_is_named() -> None:
    spec = TensorSpec("x", "input", FLOAT, ("batch", "seq_len"))
    with pytest.raises(HearthError) as caught:
        spec.resolve(DIMS._replace(seq_len=0))
    assert (caught.value.code, caught.value.field) == ("invalid_value", "seq_len")


def test_a_member_that_no_binding_uses_may_be_anything() -> None:
    spec = TensorSpec("x", "input", FLOAT, ("batch",))
    assert spec.resolve(DIMS._replace(kv_len=0)) == (2,)


@pytest.mark.parametrize("pattern", ["k_{i}_x", "k_%d_x"])
def test_layers_are_expanded(pattern: str) -> None:
    registry = TensorRegistry()
    registry.add(TensorSpec(pattern, "input", FLOAT, ("batch",)), layers=3)
    assert [spec.name for spec in registry.specs] == ["k_0_x", "k_1_x", "k_2_x"]


def test_a_binding_is_registered_once() -> None:
    registry = TensorRegistry()
    registry.add(TensorSpec("x", "input", FLOAT, ("batch",)))
    with pytest.raises(HearthError, match="twice"):
        registry.add(TensorSpec("x", "output", FLOAT, ("batch",)))


def test_a_native_decoder_gets_its_caches_back() -> None:
    registry = build_registry_for_llm(simulated_config(layers=2))
    names = [spec.name for spec in registry.specs]
    assert len(names) == 5 + 2 * 2 * 2
    past, present = registry.get("k_cache_1"), registry.get("present_k_cache_1")
    assert past is not None
    assert present is not None
    assert past.resolve(DIMS) == present.resolve(DIMS) == (2, 1, 256, 2)
    assert registry.get("rope_cos") is None


def test_a_classic_decoder_gives_new_rows_and_takes_short_integers() -> None:
    config = structs.replace(simulated_config(), dialect="classic")
    registry = build_registry_for_llm(config)
    present, start = registry.get("present_v_cache_0"), registry.get("kvcache_start_index")
    assert present is not None
    assert start is not None
    assert present.resolve(DIMS) == (2, 1, 5, 2)
    assert (start.dtype, start.resolve(DIMS)) == (np.dtype(np.int32), (2,))
    assert index_dtype(simulated_config()) == np.dtype(np.int64)


def test_rows_with_tables_of_their_own_and_features_behind_layers() -> None:
    config = structs.replace(
        simulated_config(layers=2), use_context_dependent_rope=True, num_deepstack_features=2
    )
    registry = build_registry_for_llm(config)
    hidden, table = config.hidden_size, (config.max_kv_cache_capacity, config.rotary_dim // 2)
    for name, shape in (
        ("deepstack_embeds_0", (2, 5, hidden)),
        ("deepstack_embeds_1", (2, 5, hidden)),
        ("rope_cos", (2, *table)),
        ("rope_sin", (2, *table)),
    ):
        spec = registry.get(name)
        assert spec is not None
        assert (spec.dtype, spec.resolve(DIMS)) == (FLOAT, shape)
    assert registry.get("deepstack_embeds_2") is None


QWEN3 = config_of("qwen3_vl", deepstack_layers=(0, 2), position_side=6, dtype="float16")


def test_bindings_of_a_tower_with_deepstack() -> None:
    registry = build_registry_for_tower(QWEN3)
    dims = TowerDims(patches=24, tokens=6)
    shapes = {spec.name: spec.resolve(dims) for spec in registry.specs}
    assert shapes == {
        "patches": (24, 3 * 2 * 14 * 14),
        "segment_ids": (24,),
        "rotary_cos": (24, 8),
        "rotary_sin": (24, 8),
        "position_ids": (4, 24),
        "position_weights": (4, 24),
        "embeddings": (6, 48),
        "deepstack_0": (6, 48),
        "deepstack_1": (6, 48),
    }
    types = {spec.name: spec.dtype for spec in registry.specs}
    assert types["patches"] == np.uint8
    assert types["position_weights"] == types["rotary_cos"] == np.float32
    assert types["embeddings"] == np.float16
    # The classic dialect has the integers that TensorRT of before wants.
    assert types["segment_ids"] == np.int32
    native = build_registry_for_tower(structs.replace(QWEN3, dialect="native")).get("segment_ids")
    assert native is not None
    assert native.dtype == np.int64


def test_each_family_has_its_own_bindings() -> None:
    def names(**fields: Any) -> set[str]:
        return {spec.name for spec in build_registry_for_tower(config_of(**fields)).specs}

    common = {"patches", "segment_ids", "embeddings"}
    rotary = {"rotary_cos", "rotary_sin"}
    windows = {"window_ids"}
    assert names(family="qwen2_5_vl", window_size=112) == common | rotary | windows
    assert names(family="idefics3", position_side=32) == common | {"position_ids"}


def test_a_call_is_of_one_token_to_the_most_patches() -> None:
    (profile,) = build_tower_profiles(structs.replace(QWEN3, max_patches=1000))
    assert profile.minimum == TowerDims(4, 1)
    assert profile.optimum == TowerDims(248, 62)
    assert profile.maximum == TowerDims(1000, 250)
