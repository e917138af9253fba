"""Things that a picture can show, what is held out, and scenes of them before they are drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Final, NamedTuple

from models.domain import likely, weighted
from models.splits import ONE_IN
from models.vocabulary import ROOMS

SHAPES: Final = (
    "circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring", "moon",
)  # fmt: skip
DEVICES: Final = (
    "lamp", "fan", "lock", "plug", "camera", "robot", "television", "speaker",
)  # fmt: skip
KINDS: Final = (*SHAPES, *DEVICES)
COLOURS: Final = {
    "red": (214, 30, 36),
    "orange": (246, 128, 20),
    "yellow": (250, 222, 40),
    "green": (28, 150, 58),
    "cyan": (50, 214, 224),
    "blue": (34, 66, 208),
    "purple": (134, 36, 190),
    "pink": (255, 136, 196),
    "white": (246, 246, 246),
    "black": (14, 14, 14),
}
CELLS: Final = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
GAUGES: Final = {"dial": 10, "thermometer": 4}  # what a step of the scale stands for
STEPS: Final = 10
_SIGNS: Final = (
    "EXIT OPEN CLOSED PUSH PULL STOP START WAIT GO HOT COLD ON OFF FULL EMPTY MEN WOMEN FIRE GAS "
    "WATER POWER DANGER KEEP OUT IN UP DOWN LEFT RIGHT FRONT BACK NORTH SOUTH EAST WEST STAIRS "
    "LIFT LOBBY ROOF ROOM TOILET SHOWER PANTRY STORE SHOP CAFE BAR BANK HOTEL TAXI BUS TRAIN BIKE "
    "CAR PARK ZOO SCHOOL CLASS LAB MUSIC ART BOOKS TOYS TOOLS PAINT GLASS PAPER METAL BIO WASTE "
    "FRAGILE HEAVY FOOD MILK SUGAR SALT FLOUR RICE PASTA BEANS COFFEE TEA JAM HONEY SOAP TOWELS "
    "SHOES COATS HATS KEYS MAIL SALE FREE NEW OLD HELLO WELCOME THANKS SORRY PRIVATE STAFF "
    "VISITOR GUEST QUIET SILENCE SMILE RESET PAUSE PLAY ALARM BELL RADIO MODEM ROUTER SERVER PUMP "
    "VALVE BOILER FILTER HEATER COOLER FRIDGE OVEN STOVE SINK WASHER DRYER IRON VACUUM ROBOT DOCK "
    "CHARGER CABLE FUSE "
)
LONGEST_TEXT: Final = 5
_WORDS: Final = (*_SIGNS.split(), *(room.upper() for room in ROOMS))
SIGNS: Final = tuple(
    dict.fromkeys(word for word in _WORDS if word.isalpha() and len(word) <= LONGEST_TEXT)
)
_CONSONANTS: Final = "BCDFGHJKLMNPQRSTVWXYZ"
_VOWELS: Final = "AEIOU"


def is_held_out(*combination: object) -> bool:
    """Return whether no training picture shows this combination: about one in eight."""
    digest = blake2b("\n".join(map(str, combination)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % ONE_IN == 0


def random_text(rng: Random) -> str:
    """Return what may be printed on a sign: a word, an invented word or a number."""
    what = weighted(rng, {"word": 0.7, "number": 0.2, "invented": 0.1})
    if what == "word":
        return rng.choice(SIGNS)
    if what == "number":
        return str(rng.randrange(1, 100))
    length = rng.randrange(2, LONGEST_TEXT + 1)
    if likely(rng, 0.5):
        return "".join(rng.choice(_CONSONANTS + _VOWELS) for _ in range(length))
    start = rng.randrange(2)
    letters = (_CONSONANTS, _VOWELS)
    return "".join(rng.choice(letters[(start + i) % 2]) for i in range(length))


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


MAKERS: Final[dict[str, Callable[[Random, tuple[int, int], Allowed], Scene]]] = {
    "objects": objects,
    "crowd": crowd,
    "signs": signs,
    "gauges": gauges,
}
