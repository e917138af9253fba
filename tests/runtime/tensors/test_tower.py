from typing import Any

import numpy as np
from msgspec import structs

from hearth.runtime.tensors.dims import TowerDims
from hearth.runtime.tensors.registry import build_registry_for_tower, build_tower_profiles
from tests.runtime.vision.tower_config import config_of

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
