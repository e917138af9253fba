"""Appliances, cameras and things the household keeps track of."""

from models.domain import Intent
from models.pools import clock, grocery, number, of_kind, one_of
from models.replies import action
from models.vocabulary import DISHES, MESSAGES, PEOPLE, PROGRAMS, TASKS

_CAMERA = ("device", of_kind("camera"))
_MINUTES = ("minutes", number(1, 60))

INTENTS = (
    Intent("start_program", "appliances", (
        ("device", of_kind("washer")), ("value", one_of(PROGRAMS)),
    ), action, (
        "start the {value} program on the {device}",
        "run the {device} on {value}",
        "start the {device} with the {value} program",
        "use the {value} program of the {device}",
        "I need the {value} program on the {device}",
    )),
    Intent("cook", "appliances", (
        ("device", of_kind("oven")), ("dish", one_of(DISHES)), _MINUTES,
    ), action, (
        "cook {dish} in the {device} for {minutes} minutes",
        "let the {device} make {dish} for {minutes} minutes",
        "start {dish} in the {device} for {minutes} minutes",
        "{minutes} minutes of {dish} in the {device}",
        "use the {device} for {dish}, {minutes} minutes",
    )),
    Intent("water", "appliances", (("device", of_kind("sprinkler")), _MINUTES), action, (
        "water with the {device} for {minutes} minutes",
        "run the {device} for {minutes} minutes",
        "let the {device} water for {minutes} minutes",
        "start the {device} for {minutes} minutes",
        "give the plants {minutes} minutes from the {device}",
    )),
    Intent("snapshot", "appliances", (_CAMERA,), action, (
        "take a picture with the {device}",
        "take a snapshot from the {device}",
        "show me a photo from the {device}",
        "get a picture from the {device}",
        "can you take a photo with the {device}?",
    )),
    Intent("record", "appliances", (_CAMERA, _MINUTES), action, (
        "record {minutes} minutes with the {device}",
        "record with the {device} for {minutes} minutes",
        "film with the {device} for {minutes} minutes",
        "let the {device} record for {minutes} minutes",
        "I want {minutes} minutes of video from the {device}",
    )),
    Intent("set_timer", "household", (_MINUTES,), action, (
        "set a timer for {minutes} minutes",
        "start a timer of {minutes} minutes",
        "wake me in {minutes} minutes",
        "tell me when {minutes} minutes are over",
        "I need a {minutes} minute timer",
    )),
    Intent("set_alarm", "household", (("time", clock),), action, (
        "set an alarm for {time}",
        "wake me at {time}",
        "I have to get up at {time}",
        "alarm at {time}",
        "let the alarm ring at {time}",
    )),
    Intent("add_item", "household", (("item", grocery),), action, (
        "add {item} to the shopping list",
        "put {item} on the shopping list",
        "we need to buy {item}",
        "I have to buy {item}",
        "write {item} on the list",
    )),
    Intent("remind", "household", (("task", one_of(TASKS)), ("time", clock)), action, (
        "remind me to {task} at {time}",
        "at {time} remind me to {task}",
        "do not let me forget to {task} at {time}",
        "I have to {task} at {time}",
        "set a reminder for {time} to {task}",
    )),
    Intent("send_message", "household", (
        ("person", one_of(PEOPLE)), ("text", one_of(MESSAGES)),
    ), action, (
        "tell {person}: {text}",
        "send a message to {person}: {text}",
        "write to {person}: {text}",
        "message {person}: {text}",
        "let {person} know: {text}",
    )),
    Intent("call", "household", (("person", one_of(PEOPLE)),), action, (
        "call {person}",
        "phone {person}",
        "ring up {person}",
        "I want to talk to {person}",
        "start a call with {person}",
    )),
)  # fmt: skip
