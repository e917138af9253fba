"""Further values for the slots of commands."""

from collections.abc import Callable
from random import Random
from typing import Final

from models.domain import likely
from models.speech.homes import PLACES
from models.speech.voice import clause, somebody
from models.vocabulary import DISHES, GROCERIES, ITEMS, MUSIC, compose_word

_VERBS: Final = (
    "water",
    "clean",
    "fix",
    "call",
    "feed",
    "buy",
    "pay",
    "wash",
    "check",
    "order",
    "bring",
    "find",
    "sell",
    "move",
    "return",
    "paint",
    "book",
)
_THINGS: Final = (
    "bills",
    "plants",
    "windows",
    "bike",
    "cat",
    "dog",
    "car",
    "oven",
    "tax form",
    "tickets",
    "curtains",
    "shoes",
    "books",
    "garden",
    "bank",
    "school",
    "plumber",
    "rent",
    "fish",
)
_SAYINGS: Final = (
    "dinner is served", "I'll be late", "good night", "welcome home", "hello everybody",
        "see you soon", "come home", "lunch is ready", "I miss you", "happy birthday",
    "time to go", "where are you", "the film starts at eight", "bring some milk",
        "I'm at the station", "good luck", "thank you", "well done", "I love you",
        "the train is late",
    "please hurry", "the shop is closed", "we are waiting", "breakfast is on the table",
        "it's your turn", "good evening", "the taxi is here", "be careful", "I have landed",
    "the keys are in the {item}", "the {item} has arrived", "the {dish} is in the oven",
        "I'm bringing {dish}", "call {person} back", "{person} says hello", "we need {grocery}",
)  # fmt: skip
_INPUTS: Final = (
    "HDMI 1",
    "HDMI 2",
    "HDMI 3",
    "HDMI 4",
    "AV",
    "USB",
    "DVD",
    "Bluetooth",
    "game console",
    "streaming",
    "the antenna",
    "satellite",
    "PC",
    "cable",
)
_COLOURS: Final = (
    "red",
    "green",
    "blue",
    "yellow",
    "orange",
    "purple",
    "pink",
    "white",
    "turquoise",
    "warm white",
    "cold white",
    "lilac",
    "magenta",
    "gold",
    "navy",
    "lavender",
    "crimson",
    "cream",
    "sky blue",
    "dark red",
    "light green",
)
_MODES: Final = (
    "dry",
    "cool",
    "heat",
    "auto",
    "fan",
    "eco",
    "sleep",
    "silent",
    "turbo",
    "party",
    "away",
    "night",
    "comfort",
    "holiday",
    "frost",
    "manual",
    "boost",
    "quiet",
    "day",
)
_PROGRAMS: Final = (
    "cotton",
    "eco",
    "quick",
    "wool",
    "delicate",
    "silk",
    "spin",
    "rinse",
    "express",
    "intensive",
    "mixed",
    "dark",
    "baby",
    "glass",
    "daily",
    "short",
    "sports",
    "jeans",
    "hygiene",
    "pots",
    "towels",
    "shirts",
)
_STYLES: Final = (
    *MUSIC,
    "classical",
    "Mozart",
    "the Beatles",
    "a love song",
    "dance",
    "metal",
    "punk",
    "my playlist",
    "something calm",
    "ocean sounds",
    "an audiobook",
    "the sports news",
    "radio one",
    "lullabies",
    "Christmas songs",
    "hits of the eighties",
)
_SPEEDS: Final = (
    "1",
    "2",
    "3",
    "4",
    "5",
    "low",
    "high",
    "medium",
    "full",
    "minimum",
    "maximum",
    "slow",
    "fast",
    "half",
    "6",
    "10",
    "max",
    "turbo",
)
_GESTURES: Final = (
    "wave",
    "nod",
    "bow",
    "dance",
    "spin",
    "clap",
    "jump",
    "sit",
    "beep",
    "smile",
    "blink",
    "salute",
    "stretch",
    "shake hands",
    "sing",
    "laugh",
)
_SURFACES: Final = (
    "table",
    "shelf",
    "desk",
    "counter",
    "sofa",
    "bed",
    "chair",
    "bench",
    "tray",
    "floor",
    "window sill",
    "sideboard",
    "dresser",
    "rug",
    "stool",
    "bookcase",
    "coffee table",
    "nightstand",
    "worktop",
    "rack",
    "cabinet",
    "mat",
    "piano",
    "box",
)


def _from(words: tuple[str, ...], made_up: float = 0.0) -> Callable[[Random], str]:
    return lambda rng: compose_word(rng) if likely(rng, made_up) else rng.choice(words)


def _numbers(low: int, high: int, step: int = 1) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(low, high + 1, step))


def _item(rng: Random) -> str:
    thing = compose_word(rng) if likely(rng, 0.3) else rng.choice(ITEMS)
    adjective = (
        "red",
        "blue",
        "small",
        "old",
        "big",
        "green",
        "black",
        "white",
        "empty",
        "new",
        "wet",
        "yellow",
    )
    return f"{rng.choice(adjective)} {thing.split()[-1]}" if likely(rng, 0.4) else thing


def _task(rng: Random) -> str:
    if likely(rng, 0.15):
        return f"call {somebody(rng)}"
    thing = compose_word(rng) if likely(rng, 0.2) else rng.choice(_THINGS)
    return f"{rng.choice(_VERBS)} the {thing}"


_SORTS: Final = ("brown", "fresh", "frozen", "green", "cat", "dog", "white", "baby", "dark")


def _grocery(rng: Random) -> str:
    word = compose_word(rng) if likely(rng, 0.3) else rng.choice(GROCERIES)
    return f"{rng.choice(_SORTS)} {word}" if likely(rng, 0.2) else word


def _dish(rng: Random) -> str:
    word = (
        compose_word(rng)
        if likely(rng, 0.2)
        else rng.choice(
            (
                *DISHES,
                "chicken",
                "turkey",
                "gratin",
                "muffins",
                "casserole",
                "beef",
                "rolls",
                "quiche",
                "tart",
                "fries",
                "salmon",
            )
        )
    )
    return (
        f"{rng.choice(('apple', 'frozen', 'sweet', 'fish', 'cheese', 'roast'))} {word}"
        if likely(rng, 0.15)
        else word
    )


VALUES: Final[dict[tuple[str, str], Callable[[Random], str]]] = {
    ("", "room"): _from(PLACES, 0.1),
    ("", "person"): somebody,
    ("", "item"): _item,
    ("add_item", "item"): _grocery,
    ("", "task"): _task,
    ("", "text"): lambda rng: clause(rng, _SAYINGS),
    ("", "dish"): _dish,
    ("set_input", "value"): _from(_INPUTS),
    ("set_colour", "value"): _from(_COLOURS),
    ("set_mode", "value"): _from(_MODES),
    ("start_program", "value"): _from(_PROGRAMS, 0.1),
    ("play", "value"): _from(_STYLES, 0.15),
    ("set_speed", "value"): _from(_SPEEDS),
    ("gesture", "value"): _from(_GESTURES),
    ("", "surface"): _from(_SURFACES, 0.05),
    ("set_volume", "value"): _numbers(0, 100, 5),
    ("", "minutes"): lambda rng: rng.choice(("30", "60", "15", "5", "10", "20", "45", "90", "2",
        "3", "120")),
    ("set_brightness", "value"): _numbers(5, 100, 5),
    ("set_position", "value"): _numbers(5, 95, 5),
}  # fmt: skip
