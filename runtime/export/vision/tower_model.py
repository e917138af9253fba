"""A vision tower's model as config.json has it, and the image rules of its processor's files."""

from math import isqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from hearth.runtime.engine_folder import TOKENIZER_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export.image_families import IMAGE_FAMILIES
from hearth.runtime.export.json_file import CONFIG_FILE, Fields, read_json, refuse_unserved
from hearth.runtime.export.options import ExportOptions, resolve_dialect
from hearth.runtime.packages import VERSION
from hearth.runtime.tower_answer import beyond_a_window
from hearth.runtime.vision.tower_inputs import ROTARY_THETA
from hearth.runtime.vision_config import Family, ImageRules, VisionConfig, VisionTokens

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
Resample = Literal["bicubic", "lanczos", "bilinear"]
_RESAMPLES: dict[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# What the classes of transformers have where a file is silent.
_TILE, _TILES, _FRAMES = 364, 4, 64


def read_rules(folder: Path, family: Family, sizes: dict[str, Any]) -> ImageRules:
    """The rules of a processor, whose own idea of the tower must be that of `sizes`.

    Raises `model_invalid` for a file that is missing or malformed, and `model_unsupported` naming
    the field for a step that is left out or another patch.
    """
    image, video = _image_fields(folder), _video_fields(folder)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not image.flag(name, default=True):
            raise _unserved_rule(name, "must be true")
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        if family != "idefics3" and image.size(name, sizes[name]) != sizes[name]:
            raise _unserved_rule(name, f"must be {sizes[name]}, as in config.json")
    mean, std = _CLIP if family == "qwen2_5_vl" else _HALF
    common: dict[str, Any] = {
        "resample": _resample(image, 1 if family == "idefics3" else 3),
        "mean": _colours(image, "image_mean", mean),
        "std": _colours(image, "image_std", std),
        "scale": image.number("rescale_factor", 1 / 255),
    }
    if family == "idefics3":
        return ImageRules(**common, **_idefics_rules(image, video))
    return ImageRules(**common, **_qwen_rules(image, video, family, sizes))


def _image_fields(folder: Path) -> Fields:
    joined = _joined(folder, "image_processor")
    if joined is not None:
        return joined
    return Fields(read_json(folder / IMAGE_FILE), IMAGE_FILE)


def _video_fields(folder: Path) -> Fields:
    """Fields of the video processor, or of the image processor where a model has one file."""
    joined = _joined(folder, "video_processor")
    if joined is not None:
        return joined
    if (folder / VIDEO_FILE).exists():
        return Fields(read_json(folder / VIDEO_FILE), VIDEO_FILE)
    return _image_fields(folder)


def _joined(folder: Path, part: str) -> Fields | None:
    path = folder / PROCESSOR_FILE
    return Fields(read_json(path), path.name).table(part) if path.exists() else None


def _qwen_rules(
    image: Fields, video: Fields, family: Family, sizes: dict[str, Any]
) -> dict[str, Any]:
    token = (sizes["patch_size"] * sizes["merge_size"]) ** 2
    least, most = _pixels(image, (56 * 56, 28 * 28 * 1280))
    video_least, video_most = _pixels(video, (128 * token, 768 * token))
    newer = family == "qwen3_vl"
    sampled = video.flag("do_sample_frames", default=newer)
    return {
        "min_pixels": least,
        "max_pixels": most,
        "video_min_pixels": video_least,
        "video_max_pixels": video_most,
        "fps": video.number("fps", 2.0) if sampled else 0.0,
        "min_frames": video.size("min_frames", 4),
        "max_frames": video.size("max_frames", 768),
    }


def _pixels(fields: Fields, default: tuple[int, int]) -> tuple[int, int]:
    """Least and most pixels: by their own names, else by those of edges that they never were."""
    size = fields.table("size") or Fields({}, "size")
    least, most = (
        fields.size(name, size.size(name, size.size(edge, known)))
        for name, edge, known in zip(
            ("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), default, strict=True
        )
    )
    if least > most:
        raise HearthError("model_invalid", "min_pixels must not exceed max_pixels", "min_pixels")
    return least, most


def _idefics_rules(image: Fields, video: Fields) -> dict[str, Any]:
    tile = _edge(image, "max_image_size", _TILE)
    sampling = video.table("video_sampling")
    if sampling is None:
        frames, size = video.size("num_frames", _FRAMES), _edge(video, "size", _TILES * tile)
        fps = video.number("fps", 1.0)
    else:
        frames, size = sampling.size("max_frames"), _edge(sampling, "video_size", tile)
        fps = sampling.number("fps")
    return {
        "longest_edge": _edge(image, "size", _TILES * tile),
        "tile_size": tile,
        "splits": image.flag("do_image_splitting", default=True),
        "video_longest_edge": size,
        "fps": fps,
        "max_frames": frames,
    }


def _edge(fields: Fields, name: str, default: int) -> int:
    size = fields.table(name)
    return default if size is None else size.size("longest_edge")


def _resample(fields: Fields, default: int) -> Resample:
    number = fields.size("resample", default)
    if number not in _RESAMPLES:
        raise _unserved_rule("resample", "must be 1, 2 or 3: Lanczos, bilinear or bicubic")
    return _RESAMPLES[number]


def _colours(
    fields: Fields, name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    values = fields.data.get(name)
    if values is None:
        return default
    if isinstance(values, list) and len(values) == len(default):
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) == len(default) and (name == "image_mean" or min(numbers) > 0):
            return numbers[0], numbers[1], numbers[2]
    raise HearthError("model_invalid", f"{name} must be a number for each of 3 colours", name)


def _unserved_rule(name: str, what: str) -> HearthError:
    return HearthError("model_unsupported", f"the processor's {name} {what}", name)


_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


def read_tokens(folder: Path, family: Family, fields: Fields) -> VisionTokens:
    """The tokens that config.json names by id, and those of Idefics3, which has them by text.

    Raises `tokenizer_mismatch` for one that the tokenizer lacks.
    """
    path = folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise HearthError("model_invalid", f"{path.name} is not a tokenizer", path.name) from error
    if family == "idefics3":
        around, whole = (_id(tokenizer, text) for text in (_FAKE, _GLOBAL))
        tokens = VisionTokens(
            image=fields.size("image_token_id"), fake_around=around, global_image=whole
        )
    else:
        tokens = VisionTokens(
            image=fields.size("image_token_id"),
            video=fields.size("video_token_id"),
            vision_start=fields.size("vision_start_token_id"),
            vision_end=fields.size("vision_end_token_id"),
        )
    for number in (tokens.image, tokens.video, tokens.vision_start, tokens.vision_end):
        if number >= 0 and tokenizer.id_to_token(number) is None:
            raise _lacks(str(number))
    return tokens


def _id(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    if number is None:
        raise _lacks(text)
    return int(number)


def _lacks(token: str) -> HearthError:
    return HearthError(
        "tokenizer_mismatch", f"{TOKENIZER_FILE} lacks the model's token {token}", TOKENIZER_FILE
    )


Activation = Literal["gelu", "gelu_tanh", "silu"]
MOST_PATCHES = 4096
"""The largest call of a vision encoder by default: scores grow with its square."""
_GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS: dict[Family, dict[str, Activation]] = {
    "qwen3_vl": _GELU,
    "qwen2_5_vl": {"silu": "silu"},
    "idefics3": _GELU,
}
# Beside those that text has too; the last two say again what the processor's own files say.
_READ = (
    "deepstack_visual_indexes depth fullatt_block_indexes hidden_act image_size in_channels "
    "in_chans layer_norm_eps num_channels num_heads num_position_embeddings out_hidden_size "
    "patch_size spatial_merge_size spatial_patch_size temporal_patch_size tokens_per_second "
    "window_size max_image_size size"
)
_COLOURS = 3
_SMALLEST_HEAD, _HEAD_STEP = 16, 8


class TowerModel(NamedTuple):
    """A tower's configuration, and what its graph alone has to know."""

    config: VisionConfig
    intermediate_size: int
    norm_eps: float
    activation: Activation

    @property
    def is_gated(self) -> bool:
        """True if the encoder has a gated MLP and RMS norms, as Qwen2.5-VL has."""
        return self.config.family == "qwen2_5_vl"

    @property
    def merged_size(self) -> int:
        """Elements of the patches of one token side by side."""
        return self.config.hidden_size * self.config.merge_size**2


def load_tower(folder: Path, options: ExportOptions) -> TowerModel | None:
    """Read the vision part of a model; None for a model without one.

    Raises `model_invalid` or `model_unsupported` naming the field, and `tokenizer_mismatch`.
    """
    fields = Fields(read_json(folder / CONFIG_FILE), CONFIG_FILE)
    vision = fields.table("vision_config")
    if vision is None:
        return None
    known = IMAGE_FAMILIES.get(fields.text("model_type"))
    if known is None:
        raise _unsupported(
            "model_type", f"of a model that sees must be one of {', '.join(IMAGE_FAMILIES)}"
        )
    family = known.name
    refuse_unserved(vision, _READ.split())
    sizes = _idefics(fields, vision) if family == "idefics3" else _qwen(vision, family)
    plan, rules = options.plan, read_rules(folder, family, sizes)
    # ONNX Runtime has not every operator of a tower in bfloat16, in each release that serves.
    narrow = plan is None and options.dtype == "bfloat16"
    config = VisionConfig(
        hearth_version=VERSION,
        backend="onnxruntime" if plan is None else "tensorrt",
        device=options.device if plan is None else "cuda",
        dialect=resolve_dialect(options),
        family=family,
        dtype="float16" if narrow else options.dtype,
        output_dtype=options.dtype if narrow else None,
        head_dim=sizes["hidden_size"] // sizes["num_heads"],
        max_patches=_largest_call(rules, sizes, options),
        rules=rules,
        tokens=read_tokens(folder, family, fields),
        **sizes,
    )
    _check(config, fields, vision)
    return TowerModel(
        config,
        vision.size("intermediate_size", 3072 if family == "idefics3" else None),
        vision.number("layer_norm_eps", 1e-6),
        _activation(vision, family),
    )


def _largest_call(rules: ImageRules, sizes: dict[str, Any], options: ExportOptions) -> int:
    """Patches of whole tokens, as many as the smallest picture and the known answer have."""
    side, merge = int(sizes["patch_size"]), int(sizes["merge_size"])
    rows, columns = beyond_a_window(sizes.get("window_size", 0) // side // merge)
    merged = merge**2
    least = max(
        (rules.tile_size // side) ** 2, rules.min_pixels // side**2, rows * columns * merged
    )
    if 0 < options.max_patches < least:
        raise HearthError(
            "invalid_value", f"max_patches must be at least {least} for this model", "max_patches"
        )
    wanted = options.max_patches or max(MOST_PATCHES, least)
    return -(-wanted // merged) * merged


def _qwen(vision: Fields, family: Family) -> dict[str, Any]:
    depth = vision.size("depth")
    sizes: dict[str, Any] = {
        "num_layers": depth,
        "num_heads": vision.size("num_heads"),
        "hidden_size": vision.size("hidden_size"),
        "output_size": vision.size("out_hidden_size"),
        "patch_size": vision.size("patch_size"),
        "temporal_patch_size": vision.size("temporal_patch_size", 2),
        "merge_size": vision.size("spatial_merge_size", 2),
    }
    if family == "qwen3_vl":
        positions = vision.size("num_position_embeddings")
        if isqrt(positions) ** 2 != positions:
            raise _invalid("num_position_embeddings", "must be a square")
        layers = _layers(vision, "deepstack_visual_indexes", depth)
        return {**sizes, "position_side": isqrt(positions), "deepstack_layers": layers}
    return {
        **sizes,
        "window_size": vision.size("window_size"),
        "full_attention_layers": _layers(vision, "fullatt_block_indexes", depth),
        "tokens_per_second": vision.number("tokens_per_second", 4.0),
    }


def _idefics(fields: Fields, vision: Fields) -> dict[str, Any]:
    image, patch = vision.size("image_size", 224), vision.size("patch_size", 32)
    return {
        "num_layers": vision.size("num_hidden_layers", 12),
        "num_heads": vision.size("num_attention_heads", 16),
        "hidden_size": vision.size("hidden_size", 1152),
        "output_size": _text_size(fields),
        "patch_size": patch,
        "merge_size": fields.size("scale_factor", 2),
        "position_side": image // patch,
    }


def _text_size(fields: Fields) -> int:
    """The decoder's hidden size; as published, Qwen2.5-VL has its text's fields at the top."""
    return (fields.table("text_config") or fields).size("hidden_size")


def _layers(vision: Fields, name: str, depth: int) -> tuple[int, ...]:
    layers = vision.data.get(name)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise _invalid(name, "must be a list of layers")
    if layers != sorted({*layers}) or not all(0 <= layer < depth for layer in layers):
        raise _invalid(name, f"must ascend, from 0 to {depth - 1}")
    return tuple(layers)


def _activation(vision: Fields, family: Family) -> Activation:
    known = _ACTIVATIONS[family]
    name = vision.text("hidden_act", next(iter(known)))
    if name not in known:
        raise _unsupported("hidden_act", f"must be {' or '.join(known)}")
    return known[name]


def _check(config: VisionConfig, fields: Fields, vision: Fields) -> None:
    if config.hidden_size % config.num_heads:
        raise _invalid("hidden_size", "must be a multiple of the number of heads")
    if config.head_dim < _SMALLEST_HEAD or config.head_dim % _HEAD_STEP:
        raise _unsupported("hidden_size", "must make heads of a multiple of 8 elements, from 16 on")
    for name in ("in_channels", "in_chans", "num_channels"):
        if vision.size(name, _COLOURS) != _COLOURS:
            raise _unsupported(name, f"must be {_COLOURS}")
    rope = vision.table("rope_parameters")
    if rope is not None and rope.number("rope_theta", ROTARY_THETA) != ROTARY_THETA:
        raise _unsupported("rope_parameters", f"must have a rope_theta of {ROTARY_THETA:g}")
    if config.output_size != _text_size(fields):
        raise _invalid("out_hidden_size", "must be the hidden_size of the text part")
    block = config.patch_size * config.merge_size
    if config.window_size % block or (config.window_size // config.patch_size) ** 2 > MOST_PATCHES:
        what = f"must be a multiple of {block} pixels, of {MOST_PATCHES} patches at most"
        raise _unsupported("window_size", what)
    # What is left over of a tile behind its last whole patch is not seen.
    if config.rules.tile_size // config.patch_size % config.merge_size:
        raise _unsupported("max_image_size", "must be whole tokens")


def _invalid(name: str, what: str) -> HearthError:
    return HearthError("model_invalid", f"{CONFIG_FILE}: {name} {what}", name)


def _unsupported(name: str, what: str) -> HearthError:
    return HearthError("model_unsupported", f"{CONFIG_FILE}: {name} {what}", name)
