"""Robots: single actions and plans."""

from models.domain import Intent
from models.pools import item, number, of_kind, one_of, other_room
from models.replies import action, fetch, patrol, tidy
from models.vocabulary import GESTURES, MESSAGES, PEOPLE, ROOMS, SURFACES

_ROBOT = ("device", of_kind("robot"))
_MOBILE = ("device", of_kind("robot", "vacuum"))
_CLEANER = ("device", of_kind("vacuum"))
_ROOM = ("room", one_of(ROOMS))
_DEGREES = ("degrees", number(10, 180, 5))

INTENTS = (
    Intent("go", "robots", (_MOBILE, _ROOM), action, (
        "send the {device} to the {room}",
        "drive the {device} to the {room}",
        "let the {device} go to the {room}",
        "move the {device} to the {room}",
        "I need the {device} in the {room}",
    )),
    Intent("clean", "robots", (_CLEANER, _ROOM), action, (
        "clean the {room} with the {device}",
        "let the {device} clean the {room}",
        "start the {device} in the {room}",
        "the {room} is dirty, send the {device}",
        "have the {device} do the {room}",
    )),
    Intent("dock", "robots", (_MOBILE,), action, (
        "send the {device} home",
        "dock the {device}",
        "bring the {device} back to its dock",
        "let the {device} charge",
        "the work is done, park the {device}",
    )),
    Intent("stop", "robots", (_MOBILE,), action, (
        "stop the {device}",
        "halt the {device}",
        "emergency stop for the {device}",
        "the {device} must stop now",
        "freeze the {device}",
    )),
    Intent("follow", "robots", (_ROBOT, ("person", one_of(PEOPLE))), action, (
        "let the {device} follow {person}",
        "send the {device} after {person}",
        "have the {device} stay with {person}",
        "the {device} should follow {person}",
        "tell the {device} to walk behind {person}",
    )),
    Intent("move_forward", "robots", (_ROBOT, ("cm", number(5, 300, 5))), action, (
        "move the {device} forward {cm} cm",
        "drive the {device} {cm} cm ahead",
        "let the {device} go {cm} cm forward",
        "{cm} cm forward with the {device}",
        "advance the {device} by {cm} cm",
    )),
    Intent("move_back", "robots", (_ROBOT, ("cm", number(5, 300, 5))), action, (
        "move the {device} back {cm} cm",
        "drive the {device} {cm} cm backwards",
        "let the {device} go {cm} cm back",
        "{cm} cm backwards with the {device}",
        "reverse the {device} by {cm} cm",
    )),
    Intent("turn_left", "robots", (_ROBOT, _DEGREES), action, (
        "turn the {device} left by {degrees} degrees",
        "rotate the {device} {degrees} degrees to the left",
        "let the {device} turn {degrees} degrees left",
        "{degrees} degrees left with the {device}",
        "spin the {device} left {degrees} degrees",
    )),
    Intent("turn_right", "robots", (_ROBOT, _DEGREES), action, (
        "turn the {device} right by {degrees} degrees",
        "rotate the {device} {degrees} degrees to the right",
        "let the {device} turn {degrees} degrees right",
        "{degrees} degrees right with the {device}",
        "spin the {device} right {degrees} degrees",
    )),
    Intent("pick", "robots", (_ROBOT, ("item", item)), action, (
        "pick up the {item} with the {device}",
        "let the {device} pick up the {item}",
        "have the {device} grab the {item}",
        "the {device} should take the {item}",
        "grab the {item} with the {device}",
    )),
    Intent("place", "robots", (_ROBOT, ("surface", one_of(SURFACES))), action, (
        "put it down on the {surface} with the {device}",
        "let the {device} place it on the {surface}",
        "have the {device} set it on the {surface}",
        "the {device} should leave it on the {surface}",
        "place it on the {surface} with the {device}",
    )),
    Intent("gesture", "robots", (_ROBOT, ("value", one_of(GESTURES))), action, (
        "let the {device} {value}",
        "make the {device} {value}",
        "have the {device} {value}",
        "the {device} should {value}",
        "tell the {device} to {value}",
    )),
    Intent("say", "robots", (_ROBOT, ("text", one_of(MESSAGES))), action, (
        "let the {device} say: {text}",
        "make the {device} say: {text}",
        "have the {device} announce: {text}",
        "the {device} should say: {text}",
        "announce with the {device}: {text}",
    )),
    Intent("fetch", "plans", (
        _ROBOT, ("item", item), ("from", one_of(ROOMS)), ("to", other_room),
    ), fetch, (
        "have the {device} bring the {item} from the {from} to the {to}",
        "let the {device} fetch the {item} from the {from} and bring it to the {to}",
        "the {device} should carry the {item} from the {from} to the {to}",
        "bring me the {item} from the {from} with the {device}, I am in the {to}",
        "send the {device} to the {from} for the {item} and then to the {to}",
    ), weight=2),
    Intent("patrol", "plans", (
        _ROBOT, ("first", one_of(ROOMS)), ("second", other_room), ("third", other_room),
    ), patrol, (
        "let the {device} patrol the {first}, the {second} and the {third}",
        "send the {device} through the {first}, the {second} and the {third}",
        "have the {device} check the {first}, then the {second}, then the {third}",
        "the {device} should look into the {first}, the {second} and the {third}",
        "do a round of the {first}, the {second} and the {third} with the {device}",
    )),
    Intent("tidy", "plans", (
        _ROBOT, ("item", item), ("surface", one_of(SURFACES)), _ROOM,
    ), tidy, (
        "let the {device} put the {item} on the {surface} in the {room}",
        "have the {device} take the {item} to the {surface} in the {room}",
        "the {item} belongs on the {surface} in the {room}, let the {device} do it",
        "tidy the {item} away to the {surface} in the {room} with the {device}",
        "the {device} should leave the {item} on the {surface} in the {room}",
    )),
)  # fmt: skip
