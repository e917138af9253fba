"""Memory of a vision tower by part, predicted from its configuration alone."""

from math import prod

from runtime.engine_folder import DATA_FILE, PLAN_FILE
from runtime.memory.sizes import ITEM_BYTES
from runtime.tensors.tower import build_registry_for_tower, tower_dims
from runtime.vision_config import VisionConfig

_MIB = 1 << 20
# Measured: the encoder, its libraries and an empty session, and the process that decodes for it.
_PROCESS_BYTES = (120 + 60) * _MIB
TOWER_HOST_PARTS = {"vision_processes": (90 + 60) * _MIB}
"""On the host of a GPU: an encoder without an engine, and the process that decodes for it."""
# Copies alive at once, measured: attention scores [heads, T, T], masks [T, T] in float32, one more
# where there are windows, and activations [T, H].
_SCORE_COPIES = {"native": 1.5, "classic": 3.0}
_MASK_COPIES = 2.5
_ACTIVATION_COPIES = 12.0
_FLOAT = 4


def predict_tower_memory(config: VisionConfig, capacity: int) -> dict[str, int]:
    """Bytes by part of a tower on its device, beside rows of `capacity` tokens.

    A picture becomes half of these tokens at most, by default. On the CPU the tower has a process
    of its own, with another one that decodes.
    """
    on_gpu = config.device == "cuda"
    patches = min(config.max_patches, max(1, capacity // 2) * config.merge_size**2)
    dims = tower_dims(config, config.max_patches if on_gpu else patches)
    specs = build_registry_for_tower(config).specs
    parts = {} if on_gpu else {"vision_processes": _PROCESS_BYTES}
    return parts | {
        "vision_weights": _weight_bytes(config),
        "vision_buffers": sum(prod(spec.resolve(dims)) * spec.dtype.itemsize for spec in specs),
        "vision_scratch": _scratch_bytes(config, patches),
    }


def _weight_bytes(config: VisionConfig) -> int:
    record = config.files.get(PLAN_FILE if config.backend == "tensorrt" else DATA_FILE)
    stored = 0 if record is None else record.bytes
    # A session on the CPU widens 16 bits when it opens.
    return stored * (_FLOAT // ITEM_BYTES[config.dtype] if config.device == "cpu" else 1)


def _scratch_bytes(config: VisionConfig, patches: int) -> int:
    if config.plan is not None and config.plan.scratch_bytes is not None:
        return config.plan.scratch_bytes
    item = _FLOAT if config.device == "cpu" else ITEM_BYTES[config.dtype]
    scores = config.num_heads * patches**2 * _SCORE_COPIES[config.dialect]
    masks = patches**2 * (_MASK_COPIES + bool(config.window_size))
    activations = patches * config.hidden_size * _ACTIVATION_COPIES
    return int((scores + masks + activations) * item)
