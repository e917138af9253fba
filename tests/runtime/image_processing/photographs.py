"""Photographs that are drawn, and the files of them."""

from io import BytesIO
from struct import pack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hearth.runtime.images import Picture
from hearth.runtime.vision_config import Family, ImageRules, VisionConfig, VisionTokens
from tests.runtime.vision.tower_config import config_of

_HALF = (0.5, 0.5, 0.5)
QWEN = VisionTokens(image=5, video=6, vision_start=3, vision_end=4)
IDEFICS = VisionTokens(image=4, fake_around=3, global_image=5)


def draw(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """[height, width, 3]: soft light, grain, and things with sharp edges before it."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 100 * np.sin(x / width * 5 + y / height * 3 + color) for color in range(3)]
    grain = random.normal(0, 12, (height, width, 3))
    image = Image.fromarray(np.clip(np.stack(waves, -1) + grain, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(20):
        left, top, size = (int(random.integers(0, n)) for n in (width, height, max(width, height)))
        color = tuple(int(value) for value in random.integers(0, 256, 3))
        pen.ellipse((left, top, left + size // 4, top + size // 5), fill=color)
        pen.line((left, top, size, size // 2), fill=color)
    return np.asarray(image)


def file_of(image: Image.Image | NDArray[np.uint8], kind: str, **options: Any) -> bytes:
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_xmp(jpeg: bytes, xmp: bytes) -> bytes:
    part = b"http://ns.adobe.com/xap/1.0/\0" + xmp
    return jpeg[:2] + b"\xff\xe1" + pack(">H", len(part) + 2) + part + jpeg[2:]


def photo(width: int, height: int) -> Picture:
    return Picture("jpeg", width, height)


def config_like(family: Family, **rules: Any) -> VisionConfig:
    """A tower of the published sizes; `rules` change how pictures are resized."""
    if family == "idefics3":
        known: dict[str, Any] = {
            "resample": "lanczos",
            "longest_edge": 1456,
            "video_longest_edge": 500,
            "tile_size": 364,
            "splits": True,
        }
        sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 1}
        tokens = IDEFICS
    else:
        side = 16 if family == "qwen3_vl" else 14
        unit = (2 * side) ** 2
        known = {
            "resample": "bicubic",
            "min_pixels": 4 * unit,
            "max_pixels": 1280 * unit,
            "video_min_pixels": 128 * unit,
            "video_max_pixels": 768 * unit,
        }
        sizes = {"patch_size": side, "merge_size": 2, "temporal_patch_size": 2}
        tokens = QWEN
    given = ImageRules(**known | {"mean": _HALF, "std": _HALF} | rules)
    return config_of(
        family, rules=given, tokens=tokens, tokens_per_second=2.0, max_patches=1 << 16, **sizes
    )
