"""Questions about the devices of a home, asked in many ways."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from models.domain import Device, Turn, likely
from models.speech.commands import plural_of, refer, said
from models.speech.homes import PLACES, SHOWN, Home
from models.speech.voice import voiced

_STATE: Final = (
    "what is the {0} doing?", "what's the {0} doing right now?", "how is the {0}?",
        "what about the {0}?",
    "what's the state of the {0}?", "check the {0} for me", "tell me how the {0} is",
        "what's up with the {0}?",
    "what state is the {0} in?", "can you check the {0}?", "is the {0} OK?",
        "what's the {0} up to?",
    "tell me the status of the {0}", "could you tell me what the {0} is doing?", "and the {0}?",
    "what's going on with the {0}?", "do you know what the {0} is doing?", "look at the {0} for me",
)  # fmt: skip
_SET: Final = (
    "what is the {0} set to?",
        "how many degrees is the {0} set to?",
    "what's the {0} at?", "how warm is the {0} set?", "what's the setting of the {0}?",
        "what did I set the {0} to?",
    "which temperature does the {0} have?", "how high is the {0} set?",
        "at how many degrees is the {0}?",
)  # fmt: skip
_EITHER: Final = (
    "is the {0} {1} or {2}?", "is the {0} {2} or {1}?",
    "is the {0} {1} or {2} right now?", "tell me if the {0} is {1} or {2}", "{0}: {1} or {2}?",
    "do you know if the {0} is {2} or {1}?", "are the {0} {1} or {2}?", "is my {0} {1} or {2} now?",
)  # fmt: skip
_YES: Final = (
    "is the {0} {1}?", "is the {0} {1} right now?", "is the {0} still {1}?",
    "have I left the {0} {1}?", "is my {0} {1}?", "can you see if the {0} is {1}?",
        "the {0} is {1}, right?",
    "are the {0} {1}?", "did somebody leave the {0} {1}?", "tell me if the {0} is {1}",
        "is {0} {1}?",
)  # fmt: skip
_PAIRS: Final = {
    "on": "off", "off": "on", "open": "closed", "closed": "open", "locked": "unlocked",
    "unlocked": "locked", "playing": "paused", "paused": "playing", "docked": "cleaning",
    "cleaning": "docked", "idle": "busy", "busy": "idle", "running": "finished",
        "finished": "running",
    "charging": "docked", "muted": "playing", "moving": "idle",
}  # fmt: skip
_MUSIC: Final = (
    "is the music on", "is the music playing or paused", "is there music", "is any music playing",
        "is the sound off", "is music playing",
    "what's playing", "is the music paused or playing", "is something playing",
        "is the music still on", "do I have music on",
)  # fmt: skip
_WHERE: Final = (
    "where is the {0}?", "where's the {0}?",
        "what room is the {0} in?",
    "in which room is the {0}?", "where do I have the {0}?", "where can I find the {0}?",
    "where's my {0}?", "tell me where the {0} is", "where did we put the {0}?",
        "the {0} is in which room?",
    "where is our {0}?", "do you know where the {0} is?", "whereabouts is the {0}?",
        "which room has the {0}?",
)  # fmt: skip


def _device(rng: Random, home: Home, touched: set[str]) -> tuple[Device, str] | None:
    device = rng.choice(home.devices)
    reference = refer(rng, home, device, ())
    if device.name in touched or reference is None or reference.found != (device,):
        return None
    return device, reference.text


def state_turn(rng: Random, home: Home, touched: set[str]) -> Turn | None:
    """Return a question for the state of a device."""
    found = _device(rng, home, touched)
    if found is None:
        return None
    device, text = found
    state, way = device.state, rng.random()
    players = [d for d in home.devices if d.kind == "speaker"]
    if device in players and way < 0.3:
        where = f" in the {device.room}" if likely(rng, 0.6) else ""
        if len([d for d in players if not where or d.room == device.room]) == 1:
            user = f"{rng.choice(_MUSIC)}{where}?"
            return said("state", voiced(rng, user, plain=0.75), f"The {device.name} is {state}.")
    answer = f"The {device.name} is {state}."
    first = state.split()[0]
    if state.startswith("set to") and way < 0.7:
        user = rng.choice(_SET).format(text)
    elif first in _PAIRS and way < 0.4:
        user = rng.choice(_EITHER).format(text, first, _PAIRS[first])
    elif first in _PAIRS and way < 0.75:
        asked = first if likely(rng, 0.5) else _PAIRS[first]
        user = rng.choice(_YES).format(text, asked)
        answer = f"{'Yes' if asked == first else 'No'}, the {device.name} is {state}."
    else:
        user = rng.choice(_STATE).format(text)
    return said("state", voiced(rng, user, (text,), plain=0.75), answer, device.name)


def where_turn(rng: Random, home: Home, _: set[str]) -> Turn | None:
    """Return a question for the room of a device."""
    found = _device(rng, home, set())
    if found is None or found[0].room in found[1]:
        return None
    device, text = found
    user = voiced(rng, rng.choice(_WHERE).format(text), (text,), plain=0.75)
    return said("where", user, f"The {device.name} is in the {device.room}.", device.name)


_WHICH: Final = (
    "what {0} do I have?", "which {0} are there?", "list my {0}",
        "what {0} have we got?",
    "tell me which {0} I have", "which {0} do you know?", "name my {0}", "show me the {0}",
        "do I have any {0}?",
    "are there any {0}?", "what are my {0} called?", "what are the names of the {0}?",
        "which {0} can you control?",
    "do we have {0}?", "tell me all the {0}", "what {0} are in the house?",
)  # fmt: skip
_COUNT: Final = (
    "how many {0} do I have?", "how many {0} are there?",
        "count the {0}",
    "what's the number of {0}?",
    "how many {0} are in the house?", "tell me how many {0} we have", "count my {0}, please",
    "do you know how many {0} there are?", "how many {0} can you control?",
        "how many {0} in total?",
)  # fmt: skip
_WHICH_ARE: Final = (
    "which {0} are {1}?", "which of the {0} are {1}?",
        "what {0} are {1}?",
    "which {0} are {1} right now?", "are any {0} {1}?", "is one of the {0} {1}?",
        "which {0} is {1}?",
    "are there any {0} that are {1}?", "did I leave any {0} {1}?", "tell me which {0} are {1}",
    "list the {0} that are {1}", "which {0} did I leave {1}?", "are some of the {0} still {1}?",
)  # fmt: skip
_ANY_ARE: Final = (
    "which devices are {1}?", "what is {1}?",
        "what's {1} at the moment?",
    "is anything {1}?", "did I leave anything {1}?", "what did I leave {1}?",
        "is something still {1}?",
    "which things are {1} right now?", "everything that is {1}, please", "what is still {1}?",
)  # fmt: skip
_ROOMS_WITH: Final = (
    "in which rooms is there a {0}?",
        "which room has a {0}?",
    "where are there {1}?", "where are the {1}?", "where do we have {1}?",
        "in what room do I have a {0}?",
    "what rooms have {1}?", "where in the house is there a {0}?", "do I have a {0} anywhere?",
)  # fmt: skip
_CALLED: Final = (
    "what is the {0} in the {1} called?",
        "which {0} is in the {1}?",
    "what's the name of the {0} in the {1}?", "do I have a {0} in the {1}?",
        "is there a {0} in the {1}?",
    "how do I call the {0} in the {1}?",
        "tell me the name of the {1} {0}",
    "which {0} do we have in the {1}?", "what's my {1} {0} called?", "have I got a {0} in the {1}?",
)  # fmt: skip
_IN_ROOM: Final = (
    "what's in the {0}?",
        "what is in the {0}?",
    "what do I have in the {0}?", "which devices are in the {0}?",
        "what can you control in the {0}?",
    "list what's in the {0}", "what things are there in the {0}?", "tell me what's in the {0}",
    "what's there in my {0}?", "show me the {0}", "anything in the {0}?",
        "is there anything in the {0}?",
    "which devices do we have in the {0}?", "what have we got in the {0}?",
        "what else is in the {0}?",
)  # fmt: skip
_ALL: Final = (
    "how many devices are there?", "how many devices do I have?",
        "how many devices are on the list?", "count my devices",
    "how many things can you control?", "how many devices do you know?",
        "how many devices are in this home?",
    "what's the total number of devices?", "how many things are connected?",
        "how many devices have we got?",
)  # fmt: skip
_EVERY: Final = (
    "what devices do I have?", "list my devices", "what's on your list?",
        "which devices are there?", "what can you control?",
    "what do I have here?", "tell me all my devices", "show me all devices",
        "name everything you can control",
    "what's connected?", "which devices do you know?", "give me the list of devices",
        "what is in this home?",
)  # fmt: skip


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)


def _group(rng: Random, home: Home) -> tuple[str, list[Device]] | None:
    """Return a noun that people use for a kind, and its devices, which may be none."""
    word = rng.choice(home.shown).kind if likely(rng, 0.88) else rng.choice(list(SHOWN))
    noun = SHOWN[word].said[0]
    found = [d for d in home.devices if noun in home.said(d)]
    if any(noun in d.name.split() and d not in found for d in home.devices):
        return None
    return noun, found


def group_turn(rng: Random, home: Home, touched: set[str]) -> Turn | None:
    """Return a question about all devices of a kind."""
    group = _group(rng, home)
    if group is None:
        return None
    noun, found = group
    many, way = plural_of(noun), rng.randrange(5)
    if way == 0:
        ask = rng.choice(_WHICH).format(many)
        answer = f"The {many}: {_names(found)}." if found else f"There are no {many}."
    elif way == 1:
        ask = rng.choice(_COUNT).format(many)
        answer = (
            f"The {many}: {_names(found)}. That is {len(found)}."
            if found
            else f"There are 0 {many}."
        )
    elif way == 2:
        ask = rng.choice(_ROOMS_WITH).format(noun, many)
        rooms = list(dict.fromkeys(d.room for d in found))
        answer = f"In the {', '.join(rooms)}." if found else f"There are no {many}."
    elif way == 3 and found:
        return _called_turn(rng, noun, found)
    else:
        states = [d.state.split()[0] for d in found if d.state.split()[0] in _PAIRS]
        if not states or touched & {d.name for d in found}:
            return None
        state = rng.choice(states) if likely(rng, 0.8) else _PAIRS[rng.choice(states)]
        ask = rng.choice(_WHICH_ARE).format(many, state)
        those = [d for d in found if d.state.split()[0] == state]
        answer = f"These are {state}: {_names(those)}." if those else f"None is {state}."
    return said("group", voiced(rng, ask, plain=0.75), answer)


def _called_turn(rng: Random, noun: str, found: list[Device]) -> Turn:
    room = rng.choice(found).room if likely(rng, 0.8) else rng.choice(PLACES)
    there = [d for d in found if d.room == room]
    ask = rng.choice(_CALLED).format(noun, room)
    answer = f"In the {room}: {_names(there)}." if there else f"There is no {noun} in the {room}."
    return said("called", voiced(rng, ask, (room,), plain=0.75), answer)


def list_turn(rng: Random, home: Home, touched: set[str]) -> Turn | None:
    """Return a question about a room or the whole list."""
    way = rng.randrange(6)
    if way < 3:
        room = rng.choice(home.devices).room if likely(rng, 0.88) else rng.choice(PLACES)
        there = [d for d in home.devices if d.room == room]
        ask = rng.choice(_IN_ROOM).format(room)
        answer = (
            f"In the {room}: {_names(there)}." if there else f"There are no devices in the {room}."
        )
    elif way == 3:
        ask = rng.choice(_ALL)
        answer = f"Your devices: {_names(home.devices)}. That is {len(home.devices)}."
    elif way == 4:
        ask, answer = rng.choice(_EVERY), f"Your devices: {_names(home.devices)}."
    else:
        if touched:
            return None
        states = [d.state.split()[0] for d in home.devices if d.state.split()[0] in _PAIRS] or [
            "on"
        ]
        state = rng.choice(states)
        ask = rng.choice(_ANY_ARE).format("", state)
        those = [d for d in home.devices if d.state.split()[0] == state]
        answer = f"These are {state}: {_names(those)}."
        if not those:
            answer = f"Nothing is {state}."
    return said("list", voiced(rng, ask, plain=0.75), answer)


WAYS: Final[tuple[Callable[[Random, Home, set[str]], Turn | None], ...]] = (
    state_turn, state_turn, where_turn, group_turn, group_turn, list_turn,
)  # fmt: skip


def question_turn(rng: Random, home: Home, touched: set[str]) -> Turn | None:
    """Return a question about the home, and its answer."""
    return rng.choice(WAYS)(rng, home, touched)
