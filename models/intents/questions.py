"""Questions about the listed devices, and scenes over all of them."""

from models import replies
from models.domain import Intent
from models.pools import (
    home_room,
    kind,
    kinds_word,
    of_kind,
    room,
    state,
    untouched,
    untouched_switch,
)
from models.replies import OFF, Step, says, scene

_HARD = 3.5  # answers over a whole list are the last thing that the model learns
_ROOM = ("room", home_room)
_LEAVE: dict[str, str | Step] = {key: value for key, value in OFF.items() if key != "blind"}
_MOVIE: dict[str, str | Step] = {
    "light": {"action": "set_brightness", "value": "20"},
    "blind": "close",
    "tv": "turn_on",
}

INTENTS = (
    Intent("ask_state", "questions", (("device", untouched), ("state", state)),
           says("The {device} is {state}."), (
        "what is the state of the {device}?",
        "how is the {device}?",
        "tell me the state of the {device}",
        "what is the {device} doing?",
        "check the {device}",
    ), needs_list=True, weight=2),
    Intent("ask_on", "questions", (("device", untouched_switch), ("state", state)),
           replies.is_on, (
        "is the {device} on?",
        "did I leave the {device} on?",
        "tell me if the {device} is on",
        "is the {device} running?",
        "is the {device} still on?",
    ), needs_list=True, weight=1.5),
    Intent("ask_room", "questions", (("device", of_kind()), ("room", room)),
           says("The {device} is in the {room}."), (
        "in which room is the {device}?",
        "which room has the {device}?",
        "tell me the room of the {device}",
        "what room is the {device} in?",
        "where in the house is the {device}?",
        "where is the {device}?",
    ), needs_list=True),
    Intent("ask_kind", "questions", (("device", of_kind()), ("kind", kind)),
           says("The {device} is of the kind {kind}."), (
        "what kind of device is the {device}?",
        "what sort of thing is the {device}?",
        "tell me the kind of the {device}",
        "what type is the {device}?",
        "explain to me what the {device} is",
    ), needs_list=True),
    Intent("list_room", "questions", (_ROOM,), replies.list_room, (
        "what is in the {room}?",
        "which devices are in the {room}?",
        "list the devices in the {room}",
        "what can you control in the {room}?",
        "tell me about the {room}",
    ), needs_list=True, weight=_HARD),
    Intent("count_room", "questions", (_ROOM,), replies.count_room, (
        "how many devices are in the {room}?",
        "count the devices in the {room}",
        "how many things can you control in the {room}?",
        "what is the number of devices in the {room}?",
        "give me the device count of the {room}",
    ), needs_list=True, weight=_HARD),
    Intent("list_kind", "questions", (("kinds", kinds_word),), replies.list_kind, (
        "which {kinds} are there?",
        "list the {kinds}",
        "what {kinds} do we have?",
        "name all {kinds}",
        "tell me about the {kinds}",
    ), needs_list=True, weight=_HARD),
    Intent("list_on", "questions", (), replies.list_on, (
        "what is on?",
        "which devices are on?",
        "list everything that is on",
        "is there anything on?",
        "what did I leave on?",
    ), needs_list=True, weight=_HARD),
    Intent("list_all", "questions", (), replies.list_all, (
        "list all devices",
        "which devices do you know?",
        "what can you control?",
        "name every device",
        "show me the whole list",
    ), needs_list=True, weight=_HARD),
    Intent("lights_off", "scenes", (_ROOM,), scene({"light": "turn_off"}), (
        "turn off all lights in the {room}",
        "all lights off in the {room}",
        "make the {room} dark",
        "no light in the {room}",
        "switch off every light in the {room}",
    ), needs_list=True, weight=_HARD),
    Intent("lights_on", "scenes", (_ROOM,), scene({"light": "turn_on"}), (
        "turn on all lights in the {room}",
        "all lights on in the {room}",
        "make the {room} bright",
        "light up the {room}",
        "switch on every light in the {room}",
    ), needs_list=True, weight=_HARD),
    Intent("movie", "scenes", (_ROOM,), scene(_MOVIE), (
        "movie time in the {room}",
        "I want to watch a film in the {room}",
        "cinema mode in the {room}",
        "get the {room} ready for a film",
        "we are watching a movie in the {room}",
    ), needs_list=True, weight=_HARD),
    Intent("leave_room", "scenes", (_ROOM,), scene(OFF), (
        "I am done in the {room}",
        "shut everything down in the {room}",
        "close up the {room}",
        "I am leaving the {room}",
        "nobody is in the {room} any more",
    ), needs_list=True, weight=_HARD),
    Intent("good_night", "scenes", (), scene(OFF), (
        "good night",
        "I am going to bed",
        "time to sleep",
        "bed time for everyone",
        "get the house ready for the night",
    ), needs_list=True, weight=_HARD),
    Intent("good_morning", "scenes", (), scene({"light": "turn_on", "blind": "open"}), (
        "good morning",
        "I am awake",
        "time to get up",
        "start the day",
        "get the house ready for the day",
    ), needs_list=True, weight=_HARD),
    Intent("leave_home", "scenes", (), scene(_LEAVE), (
        "I am leaving the house",
        "we are going out",
        "nobody is home",
        "bye, I am off to work",
        "get the house ready for our trip",
    ), needs_list=True, weight=_HARD),
    Intent("lock_up", "scenes", (), scene({"lock": "lock", "blind": "close"}), (
        "lock up the house",
        "lock everything",
        "make the house safe",
        "close and lock everything",
        "nobody should get in",
    ), needs_list=True, weight=_HARD),
)  # fmt: skip
