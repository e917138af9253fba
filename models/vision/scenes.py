"""Scenes: what is where in a picture, before it is drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, NamedTuple

from models.chances import likely
from models.vision.things import COLOURS, GAUGES, KINDS, STEPS, is_held_out, random_text

MOST_OF_A_KIND: Final = 5
MOST_COUNTED: Final = 8

Allowed = Callable[..., bool]


class Thing(NamedTuple):
    """A shape or the icon of a device: its cell, its centre and its size in pixels."""

    kind: str
    colour: str
    column: int
    row: int
    x: float
    y: float
    size: int


class Sign(NamedTuple):
    """A plate with a printed text, centred here; letters of so many pixels."""

    text: str
    x: float
    y: float
    size: int
    dark: bool


class Gauge(NamedTuple):
    """A dial or a thermometer that shows `value` steps of its scale."""

    kind: str
    colour: str
    value: int
    x: float
    y: float
    size: int
    dark: bool

    @property
    def reading(self) -> int:
        """Return what it reads, in the units of its scale."""
        return self.value * GAUGES[self.kind]


@dataclass(frozen=True)
class Scene:
    """Everything in one picture of this size; `group` is what it was made for."""

    group: str
    width: int
    height: int
    things: tuple[Thing, ...] = ()
    signs: tuple[Sign, ...] = ()
    gauges: tuple[Gauge, ...] = ()

    def mirrored(self, *, across: bool, down: bool) -> "Scene":
        """Return the scene with every thing moved to its mirrored place, itself unturned."""
        things = tuple(
            thing._replace(
                x=self.width - thing.x if across else thing.x,
                y=self.height - thing.y if down else thing.y,
            )
            for thing in self.things
        )
        return replace(self, things=things)


def in_training(*combination: object) -> bool:
    """Return whether training may show this combination."""
    return not is_held_out(*combination)


def anything(*_: object) -> bool:
    """Allow every combination."""
    return True


def _thing(
    rng: Random, what: tuple[str, str], cell: tuple[int, int], grid: int, size: tuple[int, int]
) -> Thing:
    width, height = size[0] / grid, size[1] / grid
    largest = min(width, height)
    pixels = rng.randrange(int(largest * 0.55), int(largest * 0.82))
    free_x, free_y = (width - pixels) / 2, (height - pixels) / 2
    x = (cell[0] + 0.5) * width + rng.uniform(-0.7, 0.7) * free_x
    y = (cell[1] + 0.5) * height + rng.uniform(-0.7, 0.7) * free_y
    return Thing(*what, *cell, x, y, pixels)


def objects(rng: Random, size: tuple[int, int], allowed: Allowed) -> Scene:
    """Return two to six things of different kinds, each in its own cell of three by three."""
    cells = [(column, row) for column in range(3) for row in range(3)]
    rng.shuffle(cells)
    kinds = rng.sample(KINDS, rng.randrange(2, 7))
    things = []
    for kind, cell in zip(kinds, cells, strict=False):
        colour = rng.choice(list(COLOURS))
        while not allowed(kind, colour, *cell):
            colour = rng.choice(list(COLOURS))
        things.append(_thing(rng, (kind, colour), cell, 3, size))
    return Scene("objects", *size, things=tuple(things))


def crowd(rng: Random, size: tuple[int, int], allowed: Allowed) -> Scene:
    """Return one to three groups of like things, strewn over four by four cells."""
    cells = [(column, row) for column in range(4) for row in range(4)]
    rng.shuffle(cells)
    things: list[Thing] = []
    seen: set[tuple[str, str]] = set()
    kinds = rng.sample(KINDS, 3)
    for _ in range(rng.randrange(1, 4)):
        kind = rng.choice(kinds)
        colour = rng.choice(list(COLOURS))
        number = rng.randrange(1, MOST_OF_A_KIND + 1)
        full = len(things) + number > MOST_COUNTED
        if full or (kind, colour) in seen:
            continue
        if allowed("count", kind, colour, number):
            seen.add((kind, colour))
            things += [_thing(rng, (kind, colour), cells.pop(), 4, size) for _ in range(number)]
    return Scene("crowd", *size, things=tuple(things)) if things else crowd(rng, size, allowed)


def signs(rng: Random, size: tuple[int, int], allowed: Allowed) -> Scene:
    """Return one sign, or one above another; a text is held out on a plate in one such place."""
    width, height = size
    number = 1 + likely(rng, 0.5)
    made = []
    for index in range(number):
        text, dark = random_text(rng), likely(rng, 0.5)
        while not allowed("sign", text, dark, number, index):
            text = random_text(rng)
        pixels = min(rng.randrange(24, 39), int(1.25 * (width - 40) / max(3, len(text))))
        room = height / number
        x = width / 2 + rng.uniform(-0.5, 0.5) * (width - 30 - 0.78 * pixels * len(text))
        y = (index + 0.5) * room + rng.uniform(-0.5, 0.5) * (room - 1.9 * pixels)
        made.append(Sign(text, x, y, pixels, dark))
    return Scene("signs", width, height, signs=tuple(made))


def gauges(rng: Random, size: tuple[int, int], allowed: Allowed) -> Scene:
    """Return a dial or a thermometer, or two of them side by side."""
    width, height = size
    number = 1 + likely(rng, 0.5)
    made = []
    for index in range(number):
        kind = rng.choice(list(GAUGES))
        colour = rng.choice([name for name in COLOURS if name not in {"white", "black", "yellow"}])
        value = rng.randrange(STEPS + 1)
        while not allowed("gauge", kind, colour, value):
            value = rng.randrange(STEPS + 1)
        room = width / number
        pixels = rng.randrange(int(min(room, height) * 0.78), int(min(room, height) * 0.96))
        if kind == "thermometer":
            pixels = rng.randrange(int(height * 0.72), int(height * 0.94))
        across = pixels if kind == "dial" else pixels * 0.4
        made.append(
            Gauge(
                kind,
                colour,
                value,
                (index + 0.5) * room + rng.uniform(-0.5, 0.5) * (room - across),
                height / 2 + rng.uniform(-0.5, 0.5) * (height - pixels),
                pixels,
                likely(rng, 0.3),
            )
        )
    return Scene("gauges", width, height, gauges=tuple(made))
