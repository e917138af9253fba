"""Switching and lighting intents."""

from models.domain import Intent
from models.pools import SWITCHED, clock, number, of_kind, one_of
from models.replies import action
from models.vocabulary import COLOURS

_SWITCHED = ("device", of_kind(*SWITCHED))
_LIGHT = ("device", of_kind("light"))

INTENTS = (
    Intent("turn_on", "switch", (_SWITCHED,), action, (
        "turn on the {device}",
        "turn the {device} on",
        "switch on the {device}",
        "switch the {device} on",
        "I want the {device} on",
        "can you power up the {device}?",
    ), weight=2),
    Intent("turn_off", "switch", (_SWITCHED,), action, (
        "turn off the {device}",
        "turn the {device} off",
        "switch off the {device}",
        "switch the {device} off",
        "I want the {device} off",
        "can you shut down the {device}?",
    ), weight=2),
    Intent("toggle", "switch", (_SWITCHED,), action, (
        "toggle the {device}",
        "flip the {device}",
        "change the {device} to its other state",
        "press the switch of the {device}",
        "toggle the switch of the {device}",
    )),
    Intent("schedule_on", "switch", (_SWITCHED, ("time", clock)), action, (
        "turn on the {device} at {time}",
        "switch the {device} on at {time}",
        "at {time} turn the {device} on",
        "start the {device} at {time}",
        "schedule the {device} to go on at {time}",
    )),
    Intent("schedule_off", "switch", (_SWITCHED, ("time", clock)), action, (
        "turn off the {device} at {time}",
        "switch the {device} off at {time}",
        "at {time} turn the {device} off",
        "stop the {device} at {time}",
        "schedule the {device} to go off at {time}",
    )),
    Intent("turn_off_after", "switch", (_SWITCHED, ("minutes", number(1, 90))), action, (
        "turn off the {device} in {minutes} minutes",
        "switch the {device} off after {minutes} minutes",
        "in {minutes} minutes turn off the {device}",
        "let the {device} run for {minutes} minutes",
        "keep the {device} on for {minutes} more minutes",
    )),
    Intent("set_brightness", "lights", (_LIGHT, ("value", number(1, 100))), action, (
        "set the {device} to {value} percent",
        "set the brightness of the {device} to {value}",
        "dim the {device} to {value} percent",
        "put the {device} at {value}%",
        "I want the {device} at {value} percent brightness",
    )),
    Intent("brighten", "lights", (_LIGHT, ("value", number(5, 60, 5))), action, (
        "brighten the {device} by {value} percent",
        "make the {device} {value} percent brighter",
        "raise the brightness of the {device} by {value}",
        "turn the {device} up by {value}%",
        "add {value} percent to the {device}",
    )),
    Intent("dim", "lights", (_LIGHT, ("value", number(5, 60, 5))), action, (
        "dim the {device} by {value} percent",
        "make the {device} {value} percent darker",
        "lower the brightness of the {device} by {value}",
        "turn the {device} down by {value}%",
        "take {value} percent off the {device}",
    )),
    Intent("set_colour", "lights", (_LIGHT, ("value", one_of(COLOURS))), action, (
        "make the {device} {value}",
        "set the {device} to {value}",
        "change the {device} to {value}",
        "turn the {device} {value}",
        "change the colour of the {device} to {value}",
    )),
    Intent("set_warmth", "lights", (_LIGHT, ("value", number(2200, 6500, 100))), action, (
        "set the {device} to {value} kelvin",
        "put the {device} at {value} K",
        "change the warmth of the {device} to {value}",
        "set the white of the {device} to {value} kelvin",
        "I want {value} kelvin from the {device}",
    )),
    Intent("blink", "lights", (_LIGHT, ("value", number(2, 20))), action, (
        "blink the {device} {value} times",
        "flash the {device} {value} times",
        "let the {device} blink {value} times",
        "make the {device} flash {value} times",
        "give me {value} flashes of the {device}",
    )),
)  # fmt: skip
