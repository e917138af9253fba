"""Refusals, corrections and requests that name no device."""

import re
from collections.abc import Callable
from random import Random
from typing import Final

from models.conversations import kinds_of
from models.domain import Device, Turn, likely
from models.speech.commands import (
    ACTIONS,
    NAMED,
    PHRASINGS,
    Command,
    Reference,
    command,
    kept_of,
    made,
    outcome,
    refer,
    said,
    slots_of,
    spoken,
    step_of,
    words_in,
)
from models.speech.homes import PLACES, SHOWN, Home
from models.speech.voice import said_number, said_time, upper, voiced
from models.vocabulary import compose_word

_STRANGER_WAYS: Final = ("name", "noun", "room", "room", "first", "elsewhere", "elsewhere")


_COMMON: Final = frozenset(("turn_on", "turn_off", "open", "close", "lock", "unlock"))


def absent_turn(rng: Random, home: Home) -> Turn | None:
    """Return a command for a device that is not there, and the refusal."""
    intent = rng.choices(ACTIONS, [4 if one.name in _COMMON else 1 for one in ACTIONS])[0]
    kinds = kinds_of(intent)
    words = [word for word, kind in SHOWN.items() if kind.base in kinds]
    if not words:
        return None
    kind = SHOWN[rng.choice(words)]
    noun = rng.choice((*kind.said, *kind.alone))
    near = rng.choice(home.devices)
    way = rng.choice(_STRANGER_WAYS)
    able = [d for d in home.devices if d.kind in kinds]
    room = rng.choice([d.room for d in home.devices] if likely(rng, 0.5) else PLACES)
    if way == "noun":
        said_as, clash = noun, able
    elif way in {"room", "elsewhere"}:
        said_as = rng.choice((f"{noun} in the {room}", f"{room} {noun}"))
        clash = [d for d in able if room in {d.room, " ".join(d.name.split()[:-1])}]
    else:
        head = near.name.split()[0] if way == "first" else compose_word(rng)
        said_as = f"{head} {noun}"
        clash = [d for d in able if head in d.name.split()]
    if any(noun.lower() in {w.lower() for w in home.said(d)} or words_in(noun, d) for d in clash):
        return None
    if any(said_as.lower() in d.name.lower() for d in home.devices):
        return None
    if way in {"name", "noun"} and any(words_in(noun, d) for d in home.devices):
        return None
    slots = slots_of(rng, intent, Device(said_as, kind.base, room, ""))
    if slots is None or any(key in {"text", "task"} for key in slots):
        return None
    text = spoken(rng, rng.choice(PHRASINGS[intent.name]), slots, said_as)
    if likely(rng, 0.12):
        head = rng.choice(("did I leave", "have I left", "is"))
        rest = upper(text.replace(f"the {said_as}", "it"))
        text = f"{head} the {said_as} on? {rest}"
    user = voiced(rng, text, (said_as, *slots.values()))
    if said_as not in user:
        return None
    return said("absent", user, f"I cannot find the {said_as} here.", said_as)


_UNABLE: Final[dict[str, tuple[str, ...]]] = {
    "switch": ("lock", "sensor", "list", "calendar"),
    "lights": ("lock", "speaker", "sensor", "robot", "washer", "fan", "heater", "plug"),
    "climate": ("light", "plug", "lock", "camera", "sensor", "vacuum", "tv", "speaker"),
    "media": ("light", "plug", "lock", "camera", "sensor", "blind", "heater", "fan", "washer"),
    "appliances": ("light", "plug", "lock", "sensor", "blind", "tv", "fan"),
    "robots": ("light", "plug", "lock", "camera", "sensor", "blind", "tv", "fan", "heater"),
    "access": ("light", "plug", "speaker", "tv", "sensor", "robot", "vacuum", "fan", "heater"),
}


def unable_turn(rng: Random, home: Home) -> Turn | None:
    """Return a command that a device does not know, and the refusal."""
    device, intent = rng.choice(home.devices), rng.choice(ACTIONS)
    if device.kind not in _UNABLE.get(intent.group, ()) or device.kind in kinds_of(intent):
        return None
    slots = slots_of(rng, intent, device._replace(kind=kinds_of(intent)[0]))
    reference = refer(rng, home, device, ())
    if slots is None or reference is None or len(reference.found) != 1:
        return None
    if any(key in {"text", "task"} for key in slots):
        return None
    if intent.group == "access" and reference.text in {
        device.room,
        " ".join(device.name.split()[:-1]),
    }:
        return None
    text = spoken(rng, rng.choice(PHRASINGS[intent.name]), slots, reference.text)
    user = voiced(rng, text, (reference.text, *slots.values()))
    return said("unable", user, f"The {device.name} cannot do that.", device.name)


_MEANT: Final = (
    "no, the {0}", "no, I meant the {0}", "I meant the {0}", "not that one, the {0}",
        "sorry, the {0}",
    "sorry, I meant the {0}", "I mean the {0}", "wrong one, the {0}", "oops, the {0}",
    "no no, the {0}", "actually the {0}", "that was wrong, I meant the {0}", "the {0} instead",
    "the {0}, not that one", "make that the {0}",
)  # fmt: skip
_TOO: Final = (
    "the {0} too", "and the {0}", "the {0} as well", "same for the {0}", "now the {0}",
    "and the {0}, please", "also the {0}", "do the same with the {0}", "and now the {0}",
)  # fmt: skip
_RATHER: Final = (
    "make that {0}", "no, {0}", "{0} instead", "sorry, {0}", "I meant {0}", "actually {0}",
    "no, I said {0}", "better {0}", "change it to {0}", "not that, {0}", "let's say {0}",
    "sorry, I meant {0}", "make it {0} instead", "rather {0}",
)  # fmt: skip
_BACK: Final = {
    "turn_on": ("turn_off", ("turn it off again", "off again", "switch it back off", "turn it off",
                             "now turn it off", "it can go off again", "kill it again")),
    "turn_off": ("turn_on", ("turn it on again", "back on", "switch it back on", "turn it on",
                             "on again, please", "no, leave it on", "put it back on")),
    "open": ("close", ("close it again", "close it", "shut it again", "now close it")),
    "close": ("open", ("open it again", "open it", "now open it again", "back open, please")),
    "lock": ("unlock", ("unlock it again", "unlock it", "now unlock it")),
    "unlock": ("lock", ("lock it again", "lock it", "now lock it again")),
    "pause": ("resume", ("go on", "carry on", "resume it", "unpause it", "continue")),
    "mute": ("unmute", ("unmute it", "sound back on", "unmute it again")),
}  # fmt: skip


def corrected_turn(rng: Random, home: Home, last: Turn) -> Turn | None:
    """Return a message that puts the last command right or goes on from it."""
    if len(last.steps) != 1 or not last.answer.startswith("{"):
        return None
    name, device, _ = last.steps[0]
    intent = NAMED.get(name)
    there = [d for d in home.devices if d.name == device]
    if intent is None or not there:
        return None
    keys = [key for key, _ in intent.slots if key != "device"]
    values = last.steps[0].value.split("|") if keys else []
    slots = dict(zip(keys, values, strict=True))
    if name in _BACK and likely(rng, 0.4):
        other, ways = _BACK[name]
        if there[0].kind not in kinds_of(NAMED[other]):
            return None
        return made(other, voiced(rng, rng.choice(ways), plain=0.85), [step_of(other, device, {})])
    if keys and likely(rng, 0.5):
        fresh = slots_of(rng, intent, there[0])
        if fresh is None or "text" in fresh or len(keys) != 1:
            return None
        shown = (
            said_time(rng, fresh["time"]) if "time" in fresh else said_number(rng, fresh[keys[0]])
        )
        user = voiced(rng, rng.choice(_RATHER).format(shown), (shown,), plain=0.95, told=True)
        return made(name, user, [step_of(name, device, fresh)])
    others = [d for d in home.devices if d.kind in kinds_of(intent) and d.name != device]
    if not others:
        return None
    reference = refer(rng, home, rng.choice(others), kinds_of(intent))
    if reference is None or len(reference.found) != 1 or reference.found[0] not in others:
        return None
    ways = _MEANT if likely(rng, 0.65) else _TOO
    user = voiced(
        rng, rng.choice(ways).format(reference.text), (reference.text,), plain=0.95, told=True
    )
    return made(name, user, [step_of(name, reference.found[0].name, slots)])


_NEVER: Final = (
    "never mind", "forget it", "leave it", "nothing, thanks", "no, it's fine", "don't do anything",
    "cancel that", "that's all right, leave it", "no thanks", "not now", "I changed my mind",
    "oh, never mind", "let's leave it", "nothing at all",
)  # fmt: skip
_DO_NOT: Final = (
    "don't {0}", "please don't {0}", "do not {0}", "you don't have to {0}", "no need to {0}",
    "never {0}", "I don't want you to {0}", "don't {0} yet", "please do not {0}",
)  # fmt: skip


_VERB: Final = re.compile(
    r"(turn|switch|open|close|lock|unlock|set|start|put|play|pause|dim|mute|shut)\b"
)


def refrain_turn(rng: Random, home: Home) -> Turn | None:
    """Return a message that asks to do nothing, and the answer that nothing is done."""
    if likely(rng, 0.3):
        return said("never", voiced(rng, rng.choice(_NEVER), plain=0.95, told=True), _NOTHING)
    one = command(rng, home)
    if one is None or one.told or not _VERB.match(one.text):
        return None
    text = rng.choice(_DO_NOT).format(one.text.rstrip("?"))
    return said("refrain", voiced(rng, text, kept_of(one), plain=0.7, told=True), _NOTHING)


_NOTHING: Final = "All right, I do nothing."
_SOUNDS: Final = {
    "next": ("skip this one", "next track, please", "skip the song", "next song", "skip it",
             "I don't like this song", "play the next one", "another song, please"),
    "pause": ("pause the music", "stop the music", "stop the music for a moment", "music off",
              "hold the music", "pause what's playing", "silence, please", "quiet, please"),
    "resume": ("go on with the music", "continue the music", "music again, please", "resume",
               "let the music go on", "unpause the music", "keep playing", "play on"),
    "volume_up": ("turn it up by {value}", "louder by {value}", "turn the music up by {value}",
                  "make the music {value} louder", "{value} louder, please"),
    "volume_down": ("turn it down by {value}", "quieter by {value}",
        "turn the music down by {value}",
                    "make the music {value} quieter", "{value} quieter, please"),
    "play": ("play {value}", "play some {value}", "put on {value}", "put some {value} on",
             "I feel like {value}", "let's hear {value}", "I'd love some {value}", "start {value}"),
}  # fmt: skip
_HEARD: Final[dict[str, Callable[[str], bool]]] = {
    "resume": lambda state: state == "paused",
    "next": lambda state: state.startswith("playing"),
    "pause": lambda state: state.startswith("playing"),
    "volume_up": lambda state: state.startswith("playing"),
    "volume_down": lambda state: state.startswith("playing"),
}


def music_turn(rng: Random, home: Home, touched: set[str]) -> Turn | None:
    """Return a request about the music that names no device: what plays is meant."""
    name = rng.choice(list(_SOUNDS))
    able = [d for d in home.devices if d.kind == "speaker"]
    if not able or touched & {d.name for d in able}:
        return None
    heard = _HEARD.get(name)
    found = [d for d in able if heard and heard(d.state)] or able
    if heard and len(found) != 1:
        return None
    slots = slots_of(rng, NAMED[name], found[0])
    if slots is None:
        return None
    text = rng.choice(_SOUNDS[name]).format(**slots)
    if likely(rng, 0.25) and name in {"next", "pause", "resume", "play"}:
        rooms = {d.room for d in found}
        room = rng.choice(sorted(rooms))
        found = [d for d in able if d.room == room]
        text += f" in the {room}"
    one = Command(name, text, slots, Reference("", tuple(found)), told=False)
    return outcome(one, voiced(rng, text, tuple(slots.values())), found)
