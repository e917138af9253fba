"""The types that intents, homes and conversations share, and random choices by shares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple


def likely(rng: Random, share: float) -> bool:
    """Return true in this share of the calls."""
    return rng.random() < share


def weighted(rng: Random, shares: Mapping[str, float]) -> str:
    """Return one of the keys, each as often as its share says."""
    return rng.choices(list(shares), list(shares.values()))[0]


class Combination(NamedTuple):
    """Unit of the held-out split: an intent with its device (or subject) and its value."""

    intent: str
    device: str
    value: str


class Device(NamedTuple):
    """One line of the list in the system prompt."""

    name: str
    kind: str
    room: str
    state: str


class Pending(NamedTuple):
    """A question which device is meant: the intent, its slots and the devices named."""

    intent: str
    slots: dict[str, str]
    names: tuple[str, ...]


@dataclass
class Context:
    """State of a conversation at one turn."""

    devices: tuple[Device, ...]
    listed: bool
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    last: str = ""
    pending: Pending | None = None

    def find(self, name: str) -> Device:
        """Return the device of that name."""
        return next(device for device in self.devices if device.name == name)


@dataclass
class Draw:
    """One attempt to fill the slots of an intent."""

    rng: Random
    context: Context
    slots: dict[str, str]


class Reply(NamedTuple):
    """An answer, the combinations that its single steps use, and whether it names nothing."""

    text: str
    steps: tuple[Combination, ...] = ()
    empty: bool = False
    pending: Pending | None = None


Pool = Callable[[Draw], "str | None"]


@dataclass(frozen=True)
class Intent:
    """One thing that a user can ask for, as data."""

    name: str
    group: str
    slots: tuple[tuple[str, Pool], ...]
    answer: "Callable[[Intent, Draw], Reply]"
    phrasings: tuple[str, ...]
    needs_list: bool = False
    remembers: str = ""
    recalls: str = ""
    weight: float = 1.0

    def combination(self, slots: dict[str, str], reply: Reply) -> Combination:
        """Return the combination of these slots; over a whole list the answer is the value."""
        first, *rest = [slots[key] for key, _ in self.slots] or [""]
        if self.needs_list and "device" not in slots:
            device = "" if reply.empty else first or "home"
            return Combination(self.name, device, reply.text)
        return Combination(self.name, first, "|".join(rest))


class Turn(NamedTuple):
    """A user message, its one right answer and the combinations that it uses.

    Where the answer calls tools, `results` are what they return and `reply` the answer to that,
    none where the user speaks first. A chat has `shown` in place of the answer where there is one:
    somebody else gave it, and nobody learns it.
    """

    intent: str
    group: str
    user: str
    answer: str
    combination: Combination
    steps: tuple[Combination, ...]
    pending: Pending | None = None
    results: tuple[str, ...] = ()
    reply: str = ""
    shown: str = ""
