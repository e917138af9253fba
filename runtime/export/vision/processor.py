"""Image rules of a model's processor, from its files of any age."""

from pathlib import Path
from typing import Any, Literal

from hearth.runtime.errors import HearthError
from hearth.runtime.export.json_file import Fields, read_json
from hearth.runtime.vision_config import Family, ImageRules

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
            raise _unsupported(name, "must be true")
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        if family != "idefics3" and image.size(name, sizes[name]) != sizes[name]:
            raise _unsupported(name, f"must be {sizes[name]}, as in config.json")
    mean, std = _CLIP if family == "qwen2_5_vl" else _HALF
    common: dict[str, Any] = {
        "resample": _resample(image, 1 if family == "idefics3" else 3),
        "mean": _colours(image, "image_mean", mean),
        "std": _colours(image, "image_std", std),
        "scale": image.number("rescale_factor", 1 / 255),
    }
    if family == "idefics3":
        return ImageRules(**common, **_idefics(image, video))
    return ImageRules(**common, **_qwen(image, video, family, sizes))


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


def _qwen(image: Fields, video: Fields, family: Family, sizes: dict[str, Any]) -> dict[str, Any]:
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


def _idefics(image: Fields, video: Fields) -> dict[str, Any]:
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
        raise _unsupported("resample", "must be 1, 2 or 3: Lanczos, bilinear or bicubic")
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


def _unsupported(name: str, what: str) -> HearthError:
    return HearthError("model_unsupported", f"the processor's {name} {what}", name)
