from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import Stream
from hearth.runtime.executor.engine import Binding, IOTensor, SelfContained
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.images import ImageLayout
from hearth.runtime.tensors.registry import build_registry_for_tower, build_tower_profiles
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import Family, ImageRules, VisionConfig, VisionTokens


def config_of(family: Family, **fields: Any) -> VisionConfig:
    known: dict[str, Any] = {
        "hearth_version": "0",
        "backend": "onnxruntime",
        "dialect": "classic",
        "family": family,
        "dtype": "float32",
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 16,
        "hidden_size": 32,
        "output_size": 48,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "max_patches": 4096,
        "rules": ImageRules(
            resample="bicubic",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            min_pixels=3136,
            max_pixels=1 << 20,
        ),
        "tokens": VisionTokens(image=1),
    }
    return VisionConfig(**known | fields)


class FakeTower(SelfContained):
    """A tower without weights, whose patches see their segment, and their place in it."""

    def __init__(self, config: VisionConfig) -> None:
        self.config = config
        specs = build_registry_for_tower(config).specs
        self.io_tensors = tuple(IOTensor(*spec) for spec in specs)
        self.calls: list[int] = []
        self.factor = 1.0

    def run(self, bindings: Sequence[Binding], _stream: Stream) -> None:
        arrays = {one.name: one.tensor.view(one.shape) for one in bindings}
        self.calls.append(len(arrays["patches"]))
        segments = arrays["segment_ids"]
        values = embed(arrays["patches"], segments[:, None] == segments, self.config)
        for feature, name in enumerate(one.name for one in bindings if one.direction == "output"):
            arrays[name][...] = values * (1 + feature * self.factor)

    def capture(self, bindings: Sequence[Binding], _stream: Stream) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.calls.append(-1)


def embed(
    patches: NDArray[np.uint8], seen: NDArray[np.bool_], config: VisionConfig
) -> NDArray[np.float32]:
    """Tokens [n, output_size]: the mean of each patch and its segment's, over merged patches."""
    means = patches.mean(axis=1, dtype=np.float64)
    own = means + (seen @ means) / seen.sum(axis=1)
    merged = own.reshape(-1, config.merge_size**2).mean(axis=1)
    return np.repeat(merged[:, None], config.output_size, axis=1).astype(np.float32)


def expected(
    patches: NDArray[np.uint8], layout: ImageLayout, config: VisionConfig
) -> NDArray[np.float32]:
    """What a FakeTower makes of a picture: [1 + deepstack features, tokens, output_size]."""
    time, height, width = layout.grid
    segments = np.repeat(np.arange(layout.segments * time), height * width)
    values = embed(patches, segments[:, None] == segments, config)
    return np.stack([values * (feature + 1) for feature in range(outputs(config))])


def outputs(config: VisionConfig) -> int:
    return 1 + config.num_deepstack_features


def fake_runner(config: VisionConfig) -> tuple[VisionRunner, FakeTower]:
    engine = FakeTower(config)
    registry, profiles = build_registry_for_tower(config), build_tower_profiles(config)
    return VisionRunner(EngineExecutor(engine, registry, profiles), config, CpuDevice()), engine
