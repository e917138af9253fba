"""Drawing a scene with Pillow, and saying what the tower should see at each merged patch."""

import math
from functools import cache
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageDraw, ImageFont

from models.vision.scenes import COLOURS, GAUGES, KINDS, STEPS, Gauge, Scene, Sign, Thing

CELL: Final = 32  # pixels of a merged patch
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
CLASSES: Final = (len(KINDS) + 4, len(COLOURS) + 1, *([len(LETTERS) + 1] * 3), STEPS + 2)
_CANVAS: Final = 256
_TEXTURES: Final = 48

Pixels = npt.NDArray[np.uint8]


def _star() -> tuple[float, ...]:
    points: list[float] = []
    for index in range(10):
        radius = 122 if index % 2 == 0 else 50
        angle = math.pi * (index / 5 - 0.5)
        points += [128 + radius * math.cos(angle), 134 + radius * math.sin(angle)]
    return tuple(points)


# Each part: the method of ImageDraw, its place, further arguments, and whether it is solid.
_PARTS: Final[dict[str, tuple[tuple[Any, ...], ...]]] = {
    "circle": (("ellipse", (20, 20, 236, 236), 1),),
    "square": (("rectangle", (34, 34, 222, 222), 1),),
    "triangle": (("polygon", (128, 16, 240, 224, 16, 224), 1),),
    "star": (("polygon", _star(), 1),),
    "heart": (
        ("ellipse", (16, 36, 136, 156), 1),
        ("ellipse", (120, 36, 240, 156), 1),
        ("polygon", (27, 130, 128, 240, 229, 130, 128, 80), 1),
    ),
    "diamond": (("polygon", (128, 8, 212, 128, 128, 248, 44, 128), 1),),
    "cross": (("rectangle", (92, 18, 164, 238), 1), ("rectangle", (18, 92, 238, 164), 1)),
    "ring": (("ellipse", (18, 18, 238, 238), 1), ("ellipse", (78, 78, 178, 178), 0)),
    "moon": (("ellipse", (20, 20, 236, 236), 1), ("ellipse", (88, -10, 284, 186), 0)),
    "lamp": (
        ("polygon", (80, 22, 176, 22, 222, 132, 34, 132), 1),
        ("rectangle", (116, 132, 140, 212), 1),
        ("rectangle", (70, 208, 186, 236), 1),
    ),
    "fan": (
        ("pieslice", (12, 12, 244, 244), 1, 0, 62),
        ("pieslice", (12, 12, 244, 244), 1, 120, 182),
        ("pieslice", (12, 12, 244, 244), 1, 240, 302),
        ("ellipse", (96, 96, 160, 160), 1),
        ("ellipse", (114, 114, 142, 142), 0),
    ),
    "lock": (
        ("arc", (70, 18, 186, 190), 1, 180, 360, 28),
        ("rectangle", (46, 110, 210, 238), 1),
        ("ellipse", (112, 140, 144, 172), 0),
        ("rectangle", (121, 160, 135, 210), 0),
    ),
    "plug": (
        ("rectangle", (78, 8, 102, 84), 1),
        ("rectangle", (154, 8, 178, 84), 1),
        ("rectangle", (50, 80, 206, 140), 1),
        ("pieslice", (50, 62, 206, 218), 1, 0, 180),
        ("rectangle", (116, 210, 140, 250), 1),
    ),
    "camera": (
        ("rectangle", (16, 74, 240, 218), 1),
        ("rectangle", (84, 42, 172, 80), 1),
        ("ellipse", (76, 96, 180, 200), 0),
        ("ellipse", (104, 124, 152, 172), 1),
    ),
    "robot": (
        ("ellipse", (110, 2, 146, 38), 1),
        ("rectangle", (121, 30, 135, 66), 1),
        ("rectangle", (46, 64, 210, 176), 1),
        ("ellipse", (78, 90, 112, 124), 0),
        ("ellipse", (144, 90, 178, 124), 0),
        ("rectangle", (88, 142, 168, 156), 0),
        ("rectangle", (74, 188, 182, 248), 1),
    ),
    "television": (
        ("rectangle", (10, 36, 246, 198), 1),
        ("rectangle", (32, 58, 224, 176), 0),
        ("rectangle", (114, 198, 142, 222), 1),
        ("rectangle", (66, 218, 190, 238), 1),
    ),
    "speaker": (
        ("rectangle", (58, 8, 198, 248), 1),
        ("ellipse", (98, 28, 158, 88), 0),
        ("ellipse", (76, 108, 180, 212), 0),
        ("ellipse", (106, 138, 150, 182), 1),
    ),
}


class Picture(NamedTuple):
    """A drawn scene: pixels [H, W, 3], and [H/32, W/32, 6] of the things in each cell.

    The six are: kind, colour, three letters from left to right, and a gauge's value; 0 is none.
    """

    pixels: Pixels
    seen: Pixels


@cache
def _canvas(kind: str) -> Image.Image:
    mask = Image.new("L", (_CANVAS, _CANVAS))
    draw = ImageDraw.Draw(mask)
    for method, place, solid, *further in _PARTS[kind]:
        names = ("start", "end", "width")
        extra = dict(zip(names, further, strict=False))
        getattr(draw, method)(place, fill=255 * solid, **extra)
    return mask


@cache
def _turned(kind: str, angle: int) -> Image.Image:
    return _canvas(kind).rotate(angle, Image.Resampling.BILINEAR)


@cache
def _mask(kind: str, size: int, angle: int) -> Image.Image:
    return _turned(kind, angle).resize((size, size), Image.Resampling.BOX)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@cache
def _textures(width: int, height: int) -> tuple[Image.Image, ...]:
    noise = np.random.default_rng(7)
    made = []
    for index in range(_TEXTURES):
        coarse = noise.normal(0, 11, (5, 5, 3)).clip(-30, 30) + 128
        smooth = Image.fromarray(coarse.astype(np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        grain = noise.normal(0, noise.uniform(1, 7), (height, width, 1 if index % 2 else 3))
        image = Image.fromarray((np.asarray(smooth) + grain).clip(0, 255).astype(np.uint8))
        made += [image, image.transpose(Image.Transpose.ROTATE_180)]
    return tuple(made)


def _background(rng: Random, scene: Scene) -> Image.Image:
    grey = rng.randrange(78, 172)
    base = tuple(grey + rng.randrange(-14, 15) for _ in range(3))
    size = (scene.width, scene.height)
    texture = rng.choice(_textures(*size))
    return ImageChops.add(texture, Image.new("RGB", size, base), 1, -128)


def _tint(rng: Random, colour: str) -> tuple[int, ...]:
    shade = rng.uniform(0.9, 1.06)
    return tuple(
        max(0, min(255, int(value * shade) + rng.randrange(-12, 13))) for value in COLOURS[colour]
    )


def _draw_thing(rng: Random, image: Image.Image, thing: Thing) -> None:
    mask = _mask(thing.kind, thing.size, rng.randrange(-12, 13, 3))
    left, top = round(thing.x - thing.size / 2), round(thing.y - thing.size / 2)
    image.paste(_tint(rng, thing.colour), (left, top, left + thing.size, top + thing.size), mask)


def _draw_sign(rng: Random, image: Image.Image, sign: Sign) -> list[tuple[str, float, float]]:
    draw = ImageDraw.Draw(image)
    font = _font(sign.size)
    length = font.getlength(sign.text)
    left = min(max(sign.x - length / 2, 9), image.width - length - 9)
    half = sign.size * 0.5
    light = tuple(rng.randrange(216, 250) for _ in range(3))
    dark = tuple(rng.randrange(10, 64) for _ in range(3))
    plate, ink = (dark, light) if sign.dark else (light, dark)
    margin = rng.randrange(4, 9)
    box = (left - margin, sign.y - half - margin, left + length + margin, sign.y + half + margin)
    draw.rounded_rectangle(box, rng.randrange(1, 6), fill=plate)
    draw.text((left, sign.y), sign.text, fill=ink, font=font, anchor="lm")
    ends = [font.getlength(sign.text[:index]) for index in range(len(sign.text) + 1)]
    return [
        (letter, left + (a + b) / 2, sign.y)
        for letter, a, b in zip(sign.text, ends, ends[1:], strict=False)
    ]


def _draw_dial(rng: Random, draw: ImageDraw.ImageDraw, gauge: Gauge, ink: Any, side: int) -> None:
    middle, radius = side / 2, side * 0.47
    for step in range(STEPS + 1):
        angle = math.radians(135 + 270 * step / STEPS)
        inner = radius * (0.78 if step % 5 == 0 else 0.86)
        ends = [
            (middle + r * math.cos(angle), middle + r * math.sin(angle))
            for r in (inner, radius * 0.95)
        ]
        draw.line(ends, fill=ink, width=max(2, side // (50 if step % 5 == 0 else 80)))
    angle = math.radians(135 + 270 * gauge.value / STEPS)
    tip = (middle + 0.74 * radius * math.cos(angle), middle + 0.74 * radius * math.sin(angle))
    colour = _tint(rng, gauge.colour)
    draw.line([(middle, middle), tip], fill=colour, width=max(4, side // 22))
    hub = side * 0.06
    draw.ellipse((middle - hub, middle - hub, middle + hub, middle + hub), fill=colour)
    font = _font(max(8, side // 11))
    draw.text(
        (middle - radius * 0.42, middle + radius * 0.6), "0", fill=ink, font=font, anchor="mm"
    )
    draw.text(
        (middle + radius * 0.4, middle + radius * 0.6), "100", fill=ink, font=font, anchor="mm"
    )


def _draw_thermometer(
    rng: Random, draw: ImageDraw.ImageDraw, gauge: Gauge, ink: Any, side: int
) -> None:
    centre, tube, bulb = side * 0.12, side * 0.032, side * 0.07
    top, bottom = side * 0.07, side * 0.82
    level = bottom + (top - bottom) * gauge.value / STEPS
    colour = _tint(rng, gauge.colour)
    glass = (200, 205, 210) if not gauge.dark else (120, 124, 130)
    draw.rectangle((centre - tube, top * 0.7, centre + tube, bottom + bulb), fill=glass)
    draw.rectangle((centre - tube, level, centre + tube, bottom + bulb), fill=colour)
    low = bottom + bulb
    draw.ellipse((centre - bulb, low - bulb, centre + bulb, low + bulb), fill=colour)
    font = _font(max(8, side // 14))
    for step in range(STEPS + 1):
        height = bottom + (top - bottom) * step / STEPS
        long = step % 5 == 0
        end = centre + side * (0.1 if long else 0.07)
        draw.line([(centre + tube * 1.5, height), (end, height)], fill=ink, width=2)
        if long:
            text = str(step * GAUGES["thermometer"])
            draw.text((side * 0.25, height), text, fill=ink, font=font, anchor="lm")


def _draw_gauge(rng: Random, image: Image.Image, gauge: Gauge) -> None:
    side = gauge.size * 2
    across = side if gauge.kind == "dial" else int(side * 0.4)
    light, dark = (238, 236, 228), (34, 36, 40)
    face, ink = (dark, light) if gauge.dark else (light, dark)
    tile = Image.new("RGB", (across, side), face)
    mask = Image.new("L", (across, side))
    outline = ImageDraw.Draw(mask)
    draw = ImageDraw.Draw(tile)
    if gauge.kind == "dial":
        outline.ellipse((0, 0, side - 1, side - 1), fill=255)
        _draw_dial(rng, draw, gauge, ink, side)
    else:
        outline.rounded_rectangle((0, 0, across - 1, side - 1), 12, fill=255)
        _draw_thermometer(rng, draw, gauge, ink, side)
    corner = (round(gauge.x - across / 4), round(gauge.y - gauge.size / 2))
    image.paste(tile.reduce(2), corner, mask.reduce(2))


def _place(seen: Pixels, x: float, y: float) -> Pixels:
    rows, columns = seen.shape[:2]
    row = min(max(int(y // CELL), 0), rows - 1)
    column = min(max(int(x // CELL), 0), columns - 1)
    here: Pixels = seen[row, column]
    return here


def draw_scene(rng: Random, scene: Scene) -> Picture:
    """Return the picture of the scene on a ground of its own."""
    image = _background(rng, scene)
    seen = np.zeros((scene.height // CELL, scene.width // CELL, len(CLASSES)), np.uint8)
    names = list(COLOURS)
    for thing in scene.things:
        _draw_thing(rng, image, thing)
        here = _place(seen, thing.x, thing.y)
        here[0], here[1] = 1 + KINDS.index(thing.kind), 1 + names.index(thing.colour)
    for gauge in scene.gauges:
        _draw_gauge(rng, image, gauge)
        here = _place(seen, gauge.x, gauge.y)
        here[0] = len(KINDS) + 1 + list(GAUGES).index(gauge.kind)
        here[1], here[5] = 1 + names.index(gauge.colour), 1 + gauge.value
    for sign in scene.signs:
        for letter, x, y in _draw_sign(rng, image, sign):
            here = _place(seen, x, y)
            here[0] = len(KINDS) + 3
            free = np.flatnonzero(here[2:5] == 0)
            if free.size:
                here[2 + free[0]] = 1 + LETTERS.index(letter)
    return Picture(np.asarray(image), seen)
