"""Things that a picture can show, and the combinations held out of training."""

from hashlib import blake2b
from random import Random
from typing import Final

from models.chances import likely, weighted
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
