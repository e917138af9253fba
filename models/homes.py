"""Homes: a list of devices and the system prompt that shows it."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from models.chances import likely
from models.domain import Device
from models.names import SEEN, UNSEEN, compose_name
from models.vocabulary import MUSIC, ROOMS

KINDS: Final = tuple(SEEN)
_WEIGHTS: Final = tuple(3 if kind in {"light", "robot"} else 1 for kind in KINDS)

HEADS: Final = (
    "You are Hearth, the assistant of this home.",
    "You are the assistant of this home.",
    "You control a home.",
    "You are a home and robot assistant.",
    "Answer briefly. Reply to commands with JSON.",
)
PLAIN: Final = (
    *HEADS,
    "You are a helpful assistant.",
    "You are Hearth.",
    "Be brief and friendly.",
    "You are a robot assistant.",
)

Namer = Callable[[Random, str], str]


def seen_name(rng: Random, kind: str) -> str:
    """Return a name of the seen list."""
    return rng.choice(SEEN[kind])


def unseen_name(rng: Random, kind: str) -> str:
    """Return a name of the unseen list."""
    return rng.choice(UNSEEN[kind])


def mixed_names(rng: Random) -> Namer:
    """Return a source of seen and composed names, with a share that varies by home."""
    share = rng.choice((0.0, 0.0, 0.5, 0.5, 1.0))

    def name(source: Random, kind: str) -> str:
        pick = compose_name if likely(source, share) else seen_name
        return pick(source, kind)

    return name


def _state(rng: Random, kind: str) -> str:
    number = rng.randrange(1, 100)
    states: dict[str, Sequence[str]] = {
        "light": ("on", "off", "off", f"on at {number}%"),
        "thermostat": (f"set to {rng.randrange(5, 31)} degrees",),
        "blind": ("open", "closed", f"{number}% open"),
        "lock": ("locked", "unlocked"),
        "speaker": ("off", "paused", f"playing {rng.choice(MUSIC)}"),
        "vacuum": ("docked", "cleaning", "charging"),
        "robot": ("idle", "charging", "busy", "docked"),
        "washer": ("off", "running", "finished"),
    }
    return rng.choice(states.get(kind, ("on", "off")))


def random_home(rng: Random, count: int, namer: Namer) -> tuple[Device, ...]:
    """Return devices with distinct names, in a few rooms."""
    rooms = rng.sample(ROOMS, min(len(ROOMS), 1 + count // 2))
    devices: dict[str, Device] = {}
    for kind in rng.choices(KINDS, _WEIGHTS, k=count):
        name = namer(rng, kind)
        devices.setdefault(name, Device(name, kind, rng.choice(rooms), _state(rng, kind)))
    return tuple(devices.values())


def system_prompt(head: str, devices: Sequence[Device]) -> str:
    """Return the system prompt that lists the devices."""
    lines = [f"- {d.name} ({d.kind}, {d.room}): {d.state}" for d in devices]
    return "\n".join([head, "Devices:", *lines])
