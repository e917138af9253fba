"""Photographs that are drawn, as JPEG files."""

from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

_QUALITY = 90
_THINGS = 20
_GRAIN = 12.0


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    @property
    def name(self) -> str:
        """Name of its figures."""
        return f"{self.width}x{self.height}"


SIZES = (Size(224, 224), Size(640, 480), Size(1920, 1080))


def photograph(size: Size, seed: int = 0) -> bytes:
    """A JPEG file: soft light, grain, and things with sharp edges before it."""
    random = np.random.default_rng(seed)
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    light = [127 + 100 * np.sin(x / width * 5 + y / height * 3 + color) for color in range(3)]
    pixels = np.stack(light, -1) + random.normal(0, _GRAIN, (height, width, 3))
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(_THINGS):
        left, top, side = (int(random.integers(0, most)) for most in (*size, max(size)))
        color = tuple(int(value) for value in random.integers(0, 256, 3))
        pen.ellipse((left, top, left + side // 4, top + side // 5), fill=color)
    file = BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def renamed(jpeg: bytes, number: int) -> bytes:
    """The same picture in a file of other bytes, which no cache has."""
    return jpeg + number.to_bytes(8, "big")
