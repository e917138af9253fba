"""Climate, blinds and locks."""

from models.domain import Intent
from models.pools import number, of_kind, one_of
from models.replies import action
from models.vocabulary import MODES, SPEEDS

_HEAT = ("device", of_kind("thermostat", "heater"))
_THERMOSTAT = ("device", of_kind("thermostat"))
_BLIND = ("device", of_kind("blind"))
_LOCK = ("device", of_kind("lock"))
_DEGREES = ("value", number(1, 6))

INTENTS = (
    Intent("set_temperature", "climate", (_HEAT, ("value", number(5, 30))), action, (
        "set the {device} to {value} degrees",
        "put the {device} at {value} degrees",
        "I want {value} degrees on the {device}",
        "change the temperature of the {device} to {value}",
        "can you set the {device} to {value}?",
    ), weight=2),
    Intent("raise_temperature", "climate", (_HEAT, _DEGREES), action, (
        "raise the {device} by {value} degrees",
        "turn the {device} up by {value} degrees",
        "make it {value} degrees warmer with the {device}",
        "increase the temperature of the {device} by {value}",
        "add {value} degrees on the {device}",
    )),
    Intent("lower_temperature", "climate", (_HEAT, _DEGREES), action, (
        "lower the {device} by {value} degrees",
        "turn the {device} down by {value} degrees",
        "make it {value} degrees cooler with the {device}",
        "reduce the temperature of the {device} by {value}",
        "take {value} degrees off the {device}",
    )),
    Intent("set_mode", "climate", (_THERMOSTAT, ("value", one_of(MODES))), action, (
        "set the {device} to {value} mode",
        "switch the {device} to {value} mode",
        "put the {device} in {value} mode",
        "change the mode of the {device} to {value}",
        "use {value} mode on the {device}",
    )),
    Intent("set_speed", "climate", (
        ("device", of_kind("fan")), ("value", one_of(SPEEDS)),
    ), action, (
        "set the {device} to {value} speed",
        "run the {device} at {value} speed",
        "change the speed of the {device} to {value}",
        "put the {device} on {value} speed",
        "I want {value} speed on the {device}",
    )),
    Intent("set_humidity", "climate", (
        ("device", of_kind("humidifier")), ("value", number(30, 70)),
    ), action, (
        "set the {device} to {value} percent humidity",
        "keep the humidity at {value} percent with the {device}",
        "I want {value} percent humidity from the {device}",
        "change the humidity of the {device} to {value}",
        "put the humidity of the {device} at {value}%",
    )),
    Intent("open", "access", (_BLIND,), action, (
        "open the {device}",
        "pull up the {device}",
        "let some light in through the {device}",
        "I want the {device} open",
        "can you open the {device}?",
    )),
    Intent("close", "access", (_BLIND,), action, (
        "close the {device}",
        "pull down the {device}",
        "shut the {device}",
        "I want the {device} closed",
        "can you close the {device}?",
    )),
    Intent("set_position", "access", (_BLIND, ("value", number(1, 99))), action, (
        "open the {device} to {value} percent",
        "set the {device} to {value} percent open",
        "move the {device} to {value}%",
        "put the {device} at position {value}",
        "I want the {device} {value} percent open",
    )),
    Intent("lock", "access", (_LOCK,), action, (
        "lock the {device}",
        "make sure the {device} is locked",
        "secure the {device}",
        "I want the {device} locked",
        "can you lock up the {device}?",
    )),
    Intent("unlock", "access", (_LOCK,), action, (
        "unlock the {device}",
        "release the lock of the {device}",
        "let me in through the {device}",
        "I want the {device} unlocked",
        "can you unlock the {device}?",
    )),
)  # fmt: skip
