"""The configuration of a vision tower (`visual/config.json`): every field, read strictly."""

from typing import Literal

import msgspec

from runtime.config import ENGINE_FORMAT, DeviceKind, DType, FileRecord, PlanRecord

Family = Literal["qwen3_vl", "qwen2_5_vl", "idefics3"]
VISION_FOLDER = "visual"
VISION_CONFIG_FILE = "config.json"


class ImageRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model's processor turns pictures into pixels; lengths in pixels.

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

    `image` stands for one embedding. The others are names of tokens in tokenizer.json.
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
    largest call of the tower.
    """

    engine_format: int = ENGINE_FORMAT
    hearth_version: str
    backend: Literal["onnxruntime", "tensorrt"]
    device: DeviceKind = "cpu"
    dialect: Literal["native", "classic"]
    plan: PlanRecord | None = None
    family: Family
    dtype: DType
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
    def weight_block_size(self) -> int:
        """None share a scale."""
        return 0

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch: 8 bits for each colour of each of its pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def num_deepstack_features(self) -> int:
        """Outputs of the tower beside the merged embeddings."""
        return len(self.deepstack_layers)
