"""The bindings of a vision tower, and the sizes of its calls."""

import numpy as np

from runtime.tensors.dims import TowerDims
from runtime.tensors.dtypes import numpy_dtype
from runtime.tensors.profiles import Profile
from runtime.tensors.registry import Direction, TensorRegistry, TensorSpec
from runtime.vision_config import VisionConfig

_TAPS = {"qwen3_vl": 4, "qwen2_5_vl": 0, "idefics3": 1}
"""Learned positions that make up one of a patch."""


def build_registry_for_tower(config: VisionConfig) -> TensorRegistry:
    """The bindings of a vision tower, as docs/architecture.md lists them."""
    registry = TensorRegistry()
    index = np.dtype(np.int64 if config.dialect == "native" else np.int32)
    real, data = np.dtype(np.float32), numpy_dtype(config.embedding_dtype)

    def add(
        name: str, dtype: np.dtype[np.generic], *shape: int | str, direction: Direction = "input"
    ) -> None:
        registry.add(TensorSpec(name, direction, dtype, shape))

    add("patches", np.dtype(np.uint8), "patches", config.patch_bytes)
    add("segment_ids", index, "patches")
    if config.window_size:
        add("window_ids", index, "patches")
    if config.family != "idefics3":
        add("rotary_cos", real, "patches", config.head_dim // 2)
        add("rotary_sin", real, "patches", config.head_dim // 2)
    taps = _TAPS[config.family]
    if taps:
        add("position_ids", index, taps, "patches")
    if taps > 1:
        add("position_weights", real, taps, "patches")
    for name in tower_outputs(config):
        add(name, data, "tokens", config.output_size, direction="output")
    return registry


def tower_outputs(config: VisionConfig) -> list[str]:
    """The outputs of a tower: merged embeddings, then what goes into the first layers of text."""
    return ["embeddings", *(f"deepstack_{k}" for k in range(config.num_deepstack_features))]


def tower_dims(config: VisionConfig, patches: int) -> TowerDims:
    """The sizes of a call of so many patches."""
    return TowerDims(patches, patches // config.merge_size**2)


def build_tower_profiles(config: VisionConfig) -> tuple[Profile]:
    """The one profile of a tower: one token to `max_patches`."""
    merged = config.merge_size**2
    most = config.max_patches // merged
    sizes = (TowerDims(tokens * merged, tokens) for tokens in (1, max(1, most // 4), most))
    return (Profile(*sizes),)
