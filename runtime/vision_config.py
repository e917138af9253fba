"""The configuration of a vision tower (`visual/config.json`): every field, read strictly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hearth.runtime.config import (
    ENGINE_FORMAT,
    DeviceKind,
    DType,
    FileRecord,
    PlanRecord,
    check_format,
)
from hearth.runtime.errors import HearthError

Family = Literal["qwen3_vl", "qwen2_5_vl", "idefics3"]
VISION_FOLDER = "visual"
VISION_CONFIG_FILE = "config.json"


class ImageRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules by which the model's processor turns pictures into pixels; lengths in pixels.

    The Qwen families resize to multiples of a merged patch with between `min_pixels` and
    `max_pixels` (`video_*`: of a frame of Qwen2.5-VL, of all frames of Qwen3-VL). Idefics3 resizes
    to a longest edge of `longest_edge` and cuts tiles of `tile_size`, if it `splits`; a frame of a
    video is resized to `video_longest_edge` first, and then to one tile. 0 where a family has no
    such rule.
    """

    resample: Literal["bicubic", "lanczos", "bilinear"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / 255
    min_pixels: int = 0
    max_pixels: int = 0
    video_min_pixels: int = 0
    video_max_pixels: int = 0
    longest_edge: int = 0
    video_longest_edge: int = 0
    tile_size: int = 0
    splits: bool = False
    fps: float = 0.0
    min_frames: int = 0
    max_frames: int = 0


class VisionTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ids around and in place of images in a prompt, -1 where a family has no such token.

    `image` is replaced by one embedding. The others are names of tokens in tokenizer.json.
    """

    image: int
    video: int = -1
    vision_start: int = -1
    vision_end: int = -1
    fake_around: int = -1
    global_image: int = -1


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the runtime knows of a vision tower; sizes in elements.

    A patch is `temporal_patch_size` x `patch_size` x `patch_size` pixels of 3 colours. `merge_size`
    squared patches become one token of `output_size`, the decoder's hidden size.
    `deepstack_layers` are the layers whose outputs go into the decoder's first layers.
    `window_size` is in pixels, 0 for none; `full_attention_layers` are those that see beyond it.
    `position_side` is the side of the square table of learned positions. `max_patches` is the
    largest call of the tower. `output_dtype` is the type of its embeddings where it is another.
    """

    engine_format: int = ENGINE_FORMAT
    hearth_version: str
    backend: Literal["onnxruntime", "tensorrt"]
    device: DeviceKind = "cpu"
    dialect: Literal["native", "classic"]
    plan: PlanRecord | None = None
    family: Family
    dtype: DType
    output_dtype: DType | None = None
    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    output_size: int
    patch_size: int
    temporal_patch_size: int = 1
    merge_size: int
    deepstack_layers: tuple[int, ...] = ()
    window_size: int = 0
    full_attention_layers: tuple[int, ...] = ()
    position_side: int = 0
    tokens_per_second: float = 0.0
    max_patches: int
    rules: ImageRules
    tokens: VisionTokens
    files: dict[str, FileRecord] = {}

    @property
    def weight_quantization(self) -> Literal["none"]:
        """The weights of towers stay as they are."""
        return "none"

    @property
    def head_weights(self) -> Literal["none"]:
        """There is no head."""
        return "none"

    @property
    def weight_block_size(self) -> int:
        """None share a scale."""
        return 0

    @property
    def embedding_dtype(self) -> DType:
        """The type of embeddings, which is the decoder's."""
        return self.output_dtype or self.dtype

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch: 8 bits for each colour of each of its pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def num_deepstack_features(self) -> int:
        """Outputs of the tower beside the merged embeddings."""
        return len(self.deepstack_layers)


def load_vision_config(engine: Path) -> VisionConfig | None:
    """The configuration of the tower of an engine folder; None for one of a text model.

    Raises `engine_corrupt`, `engine_incompatible`, and `engine_missing` for what may not be read.
    """
    path = engine / VISION_FOLDER / VISION_CONFIG_FILE
    try:
        data = path.read_bytes() if path.parent.is_dir() else None
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
        raise HearthError("engine_missing", what, VISION_FOLDER) from error
    return None if data is None else parse_vision_config(data, str(path))


def parse_vision_config(data: bytes, source: str = VISION_CONFIG_FILE) -> VisionConfig:
    """Read a tower's `config.json`; raises as `load_vision_config` does."""
    try:
        config = msgspec.json.decode(data, type=VisionConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = f"{source} cannot be read: {error}"
        raise HearthError("engine_corrupt", what, VISION_FOLDER) from error
    check_format(config.engine_format, source)
    for wrong, name, what in _faults(config):
        if wrong:
            raise HearthError("engine_corrupt", f"{name} {what}", name)
    return config


_POSITIVE = [
    field.name
    for field in msgspec.structs.fields(VisionConfig)
    if field.type is int and (field.required or field.default > 0)
]


def _faults(config: VisionConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield for each field True if it is wrong, its name, and what it must be."""
    for name in _POSITIVE:
        yield getattr(config, name) < 1, name, "must be at least 1"
    yield (
        config.num_heads * config.head_dim != config.hidden_size,
        "head_dim",
        "must be hidden_size / num_heads",
    )
    block, rules = config.patch_size * config.merge_size, config.rules
    yield config.max_patches % config.merge_size**2 > 0, "max_patches", "must be whole tokens"
    learned = config.family != "qwen2_5_vl"
    yield learned != (config.position_side > 0), "position_side", "must be that of the family"
    windows = config.family == "qwen2_5_vl"
    wrong = windows != (config.window_size > 0) or config.window_size % block > 0
    wrong |= (config.window_size // config.patch_size) ** 2 > config.max_patches
    yield wrong, "window_size", "must be that of the family, whole tokens, and within a call"
    for name in ("deepstack_layers", "full_attention_layers"):
        layers = getattr(config, name)
        ascends = layers == tuple(sorted({*layers}))
        within = all(0 <= layer < config.num_layers for layer in layers)
        yield not (ascends and within), name, "must be layers, and ascend"
    tiles = config.family == "idefics3"
    across = rules.tile_size // config.patch_size
    wrong = tiles != (across > 0) or across % config.merge_size > 0
    yield wrong, "rules", "must have tiles of whole tokens in their family"
    wrong = not tiles and not 0 < rules.min_pixels <= rules.max_pixels
    yield wrong, "rules", "must have pixels, the least and the most"
    yield min(rules.std) <= 0 or rules.scale <= 0, "rules", "must scale by positive numbers"
    yield config.tokens.image < 0, "tokens", "must have one in place of images"
