"""The smallest loop that can run a tower's graph."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.tensors.registry import build_registry_for_tower
from hearth.runtime.vision.tower_inputs import Segment, tower_inputs
from hearth.runtime.vision_config import VisionConfig

Array = NDArray[Any]


def random_patches(config: VisionConfig, segments: Sequence[Segment], seed: int = 0) -> Array:
    """Patches [T, patch bytes] of noise for all segments."""
    count = sum(segment.patches for segment in segments)
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, config.patch_bytes), np.uint8)


def run_tower(
    folder: Path, config: VisionConfig, segments: Sequence[Segment], patches: Array
) -> dict[str, Array]:
    """All outputs of the graph in a folder `visual`, by name."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(folder / MODEL_FILE, options, providers=["CPUExecutionProvider"])
    registry = build_registry_for_tower(config)
    inputs = {
        spec.name: tower_inputs(segments, config)[spec.name].astype(spec.dtype)
        for spec in registry.specs
        if spec.direction == "input" and spec.name != "patches"
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"patches": patches, **inputs}), strict=True))
