"""Wording of what a user says: politeness, contractions, and devices named in part."""

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from models.domain import Context, Device, likely, weighted

_NOUNS: Final[dict[str, tuple[str, ...]]] = {
    "light": ("light", "lamp"),
    "plug": ("plug",),
    "thermostat": ("thermostat", "heating", "thermostat"),
    "heater": ("heater", "heating", "heater"),
    "blind": ("blind", "curtain", "shutter", "shade", "blinds", "curtains"),
    "lock": ("lock", "door", "door", "gate"),
    "speaker": ("speaker", "speaker", "radio"),
    "tv": ("tv", "television", "telly", "screen", "TV"),
    "fan": ("fan",),
    "camera": ("camera",),
    "vacuum": ("vacuum", "vacuum cleaner", "hoover"),
    "robot": ("robot",),
    "oven": ("oven", "cooker"),
    "washer": ("washer", "washing machine"),
    "humidifier": ("humidifier", "purifier"),
    "sprinkler": ("sprinkler", "sprinklers"),
    "sensor": ("sensor",),
}
_BY_PLACE: Final = frozenset({"lock", "blind"})
_ASKABLE: Final = range(2, 5)
"""Number of devices that a question names."""

_DOUBLED: Final = frozenset(("cut", "dim", "drop", "flip", "get", "let", "put", "run", "set",
                             "shut", "skip", "snap", "spin", "stop"))  # fmt: skip
_VERBS: Final = _DOUBLED | frozenset((
    "activate", "add", "adjust", "bake", "blink", "bolt", "bring", "brighten", "call", "change",
    "charge", "check", "clean", "close", "cook", "deactivate", "decrease", "dock", "drive",
    "fetch", "film", "fire", "flash", "freeze", "give", "go", "grab", "halt", "have", "heat",
    "hold", "increase", "keep", "kill", "lift", "light", "list", "lock", "lower", "make", "message",
    "move", "mute", "name", "open", "park", "pause", "phone", "pick", "place", "play", "power",
    "press", "pull", "raise", "record", "reduce", "release", "remind", "resume", "return",
    "reverse", "ring", "roll", "rotate", "schedule", "secure", "send", "show", "silence", "start",
    "stream", "switch", "take", "tell", "text", "toggle", "tune", "turn", "unbolt", "unlock",
    "unmute", "unpause", "use", "wake", "water", "write",
))  # fmt: skip
_ASKED: Final = (
    "can you {}?", "could you {}?", "can you please {}?", "could you please {}?", "would you {}?",
    "will you {}?", "could you {} please?", "can you {} for me?", "could you {} for me?",
    "would you please {}?", "can we {}?", "do you think you could {}?", "any chance you can {}?",
    "could I ask you to {}?", "can I ask you to {}?", "why don't you {}?", "can you just {}?",
    "would you be so kind and {}?", "is it possible to {}?", "could you quickly {}?",
)  # fmt: skip
_TOLD: Final = (
    "please {}", "{} please", "{}, please", "I'd like you to {}", "I want you to {}",
    "I need you to {}", "go ahead and {}", "hey, {}", "OK, {}", "ok {}", "now {}", "just {}",
    "{} now", "{} right now", "{}, will you?", "{}, thanks", "{}, would you?", "{}, thank you",
    "let's {}", "do me a favour and {}", "you can {}", "I'd like to {}", "I want to {}",
    "quickly {}", "{} for me", "{} for me, please", "please {} for me", "so, {}", "well, {}",
    "sorry, {}", "then {}", "next, {}", "I think we should {}", "we should {}", "be nice and {}",
    "time to {}", "you may {}", "please just {}", "Hearth, {}", "Hearth, please {}", "{} Hearth",
    "hi, {}", "hello, {}", "I was hoping you could {}", "it would be great if you could {}",
    "it would be nice if you could {}", "I need to {}", "{} if you can", "{} again",
)  # fmt: skip
_GERUND: Final = (
    "would you mind {}?", "do you mind {}?", "how about {}?", "mind {}?", "what about {}?",
    "I'm thinking of {}", "try {}",
)  # fmt: skip
_SHORT: Final = (
    ("what is ", "what's "), ("where is ", "where's "), ("who is ", "who's "),
    ("how is ", "how's "), ("do not ", "don't "), ("I am ", "I'm "), ("I would ", "I'd "),
    ("I have to ", "I've got to "), ("it is ", "it's "), ("we are ", "we're "),
    ("I want ", "I'd like "), ("when is ", "when's "),
)  # fmt: skip
_LEADS: Final = ("the", "the", "the", "my", "our", "that")


class Said(NamedTuple):
    """A device as a user names it: its text, and the kind, room and words that it tells."""

    text: str
    kind: str = ""
    room: str = ""
    words: tuple[str, ...] = ()

    def fits(self, device: Device) -> bool:
        """Return whether this may be meant."""
        name = device.name.split()
        return (
            (not self.kind or device.kind == self.kind)
            and (not self.room or self.room == device.room or self.room in device.name)
            and all(word in name or word in device.room.split() for word in self.words)
        )


def meant(context: Context, kinds: Sequence[str], said: Said) -> list[Device]:
    """Return the devices of these kinds (of any if there are none) that may be meant.

    Of lamps and lights "the lamp" means those that are called so, where there are any.
    """
    named = [d for d in context.devices if d.name == said.text]
    if named:
        return named
    found = [d for d in context.devices if (not kinds or d.kind in kinds) and said.fits(d)]
    told = {word for word in said.text.split() if word in _NOUNS.get(said.kind, ())} - {said.kind}
    return [d for d in found if told & set(d.name.split())] or found


def in_part(rng: Random, device: Device, kinds: Sequence[str]) -> Said:
    """Return a name that tells less than the device's own."""
    kind, room = device.kind, device.room
    noun = rng.choice(_NOUNS[kind])
    *head, last = device.name.split()
    ways = [
        Said(noun, kind),
        Said(f"{room} {noun}", kind, room),
        Said(f"{noun} in the {room}", kind, room),
    ]
    if head:
        first = " ".join(head)
        ways += [Said(last, words=(last,)), Said(first, words=tuple(head))]
        ways += [Said(f"{first} one", words=tuple(head))]
        ways += [Said(f"{first} {noun}", kind, words=tuple(head))]
    if kinds and _BY_PLACE.issuperset(kinds):
        ways += [Said(room, room=room)] * 2
    return rng.choice(ways)


def stranger(rng: Random, kind: str, device: Device, rooms: Sequence[str]) -> Said:
    """Return a name of this kind that is like that of a device, or of a room."""
    noun, room = rng.choice(_NOUNS[kind]), rng.choice(rooms)
    first = device.name.split()[0]
    ways = [
        Said(noun, kind),
        Said(f"{room} {noun}", kind, room),
        Said(f"{noun} in the {room}", kind, room),
        Said(f"{first} {noun}", kind, words=(first,)),
        Said(first, words=(first,)),
    ]
    if kind in _BY_PLACE:
        ways += [Said(room, room=room), Said(device.room, room=device.room)] * 2
    return rng.choice(ways)


def question(names: Sequence[str]) -> str:
    """Return the question which of these devices is meant."""
    return f"Which one: {', '.join(names[:-1])} or {names[-1]}?"


def may_ask(devices: Sequence[Device]) -> bool:
    """Return whether a question names these devices."""
    return len(devices) in _ASKABLE


def shortened(rng: Random, phrasing: str) -> str:
    """Return a phrasing, whose slots are not filled yet, with contractions."""
    for long, short in _SHORT:
        if long in phrasing and likely(rng, 0.5):
            phrasing = phrasing.replace(long, short)
    return phrasing


def _gerund(verb: str) -> str:
    if verb in _DOUBLED:
        return f"{verb}{verb[-1]}ing"
    return f"{verb.removesuffix('e')}ing"


def is_command(text: str) -> bool:
    """Return whether the text begins with a verb that a user may ask for."""
    return text.partition(" ")[0] in _VERBS and not text.endswith("?")


def polite(rng: Random, text: str) -> str:
    """Return a command as a question, as a wish or with a kind word."""
    way = weighted(rng, {"told": 0.5, "asked": 0.42, "gerund": 0.08})
    if way == "told":
        return rng.choice(_TOLD).format(text)
    if way == "asked":
        asked = rng.choice(_ASKED).format(text)
        return asked if likely(rng, 0.85) else asked[:-1]
    verb, _, rest = text.partition(" ")
    return rng.choice(_GERUND).format(f"{_gerund(verb)} {rest}")


def lead(rng: Random, phrasing: str) -> str:
    """Return a phrasing with another word before the device, or none."""
    if likely(rng, 0.12) and not phrasing.startswith("the"):
        return phrasing.replace("the {device}", "{device}")
    return phrasing.replace("the {device}", f"{rng.choice(_LEADS)} {{device}}")


def choices(rng: Random, devices: Sequence[Device], chosen: int) -> str:
    """Return how a user says which of these devices is meant."""
    device = devices[chosen]
    ways = [
        device.name,
        f"the {device.name}",
        f"the {device.name}, please",
        f"{device.name} please",
    ]
    ways += [f"I mean the {device.name}", f"I meant the {device.name}", f"{device.name}, thanks"]
    if sum(other.room == device.room for other in devices) == 1:
        ways += [f"the one in the {device.room}", f"in the {device.room}"]
    first = device.name.split()[0]
    if sum(first in other.name.split() for other in devices) == 1:
        ways += [f"the {first} one", first]
    if chosen == 0:
        ways += ["the first one", "the first"]
    if chosen == len(devices) - 1:
        ways += ["the last one"]
    if chosen == 1:
        ways += ["the second one", "the second"]
    return rng.choice(ways)
