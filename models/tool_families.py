"""Tools that homes and robots have, as data: names, parameters, requests and results."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple

from models.domain import likely
from models.vocabulary import (
    COLOURS,
    DAYS,
    GROCERIES,
    ITEMS,
    MESSAGES,
    MUSIC,
    PEOPLE,
    ROOMS,
    compose_word,
)

_CITIES: Final = (
    "Paris", "Berlin", "Rome", "Oslo", "Madrid", "Vienna", "Lisbon", "Dublin", "Prague", "Athens",
)  # fmt: skip
MEASURES: Final = {
    "temperature": "degrees", "humidity": "percent", "pressure": "hPa", "brightness": "lux",
    "level": "percent", "power": "watts", "water": "litres", "noise": "decibels",
}  # fmt: skip
ERRORS: Final = (
    "offline",
    "timeout",
    "not found",
    "no answer",
    "busy",
    "out of reach",
    "no power",
)

Value = str | int | bool
Values = Callable[[Random], Value]


class Parameter(NamedTuple):
    """A parameter: its possible names, its type, its values, and whether it may be left out."""

    names: tuple[str, ...]
    kind: str
    values: Values
    fixed: bool = False


class Family(NamedTuple):
    """A kind of tool, as data: its possible names, parameters, requests and results.

    Requests and replies have a slot for each parameter, by its number. `covers` are the intents or
    groups that the tool takes over.
    """

    names: tuple[str, ...]
    does: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asked: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    covers: frozenset[str] = frozenset()


def among(words: Sequence[str], made_up: float = 0.25) -> Values:
    """Return values that are one of these words, or in a share of the cases a made-up one."""

    def value(rng: Random) -> str:
        return compose_word(rng) if likely(rng, made_up) else rng.choice(words)

    return value


def _between(low: int, high: int) -> Values:
    return lambda rng: rng.randrange(low, high + 1)


def time_of_day(rng: Random) -> str:
    """Return a time of day."""
    return f"{rng.randrange(24):02d}:{rng.randrange(0, 60, 5):02d}"


def _spot(rng: Random) -> str:
    room = compose_word(rng) if likely(rng, 0.3) else rng.choice(ROOMS)
    return f"{room} {rng.choice(tuple(MEASURES))}" if likely(rng, 0.4) else room


def _name(rng: Random) -> str:
    return compose_word(rng).capitalize() if likely(rng, 0.3) else rng.choice(PEOPLE)


def text_field(*names: str, values: Values) -> Parameter:
    """Return a parameter that is text."""
    return Parameter(names, "string", values)


def number_field(*names: str, low: int, high: int) -> Parameter:
    """Return a parameter that is a whole number from low to high."""
    return Parameter(names, "integer", _between(low, high))


def choice_field(*names: str, words: Sequence[str]) -> Parameter:
    """Return a parameter whose definition lists its values."""
    return Parameter(names, "string", lambda rng: rng.choice(words), fixed=True)


DONE: Final = (
    ('{"ok": true}', "Done."), ("ok", "Done."), ('{"status": "done"}', "Done."),
    ('{"result": "success"}', "Done."), ("done", "Done."), ('{"success": true}', "Done."),
    ('{"error": "%e"}', "That did not work: %e."), ("error: %e", "That did not work: %e."),
    ('{"ok": false, "reason": "%e"}', "That did not work: %e."),
)  # fmt: skip
STATES: Final = (
    "on", "off", "open", "closed", "locked", "unlocked", "idle", "charging", "running", "paused",
    "set to 21 degrees", "on at 40%", "50% open", "playing jazz",
)  # fmt: skip
# %s is a state, %n a number, %u a unit, %w a made-up word, %p a person, %e an error.

FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        ("read_sensor", "get_sensor", "sensor_value", "readSensor", "measure", "get_reading"),
        ("Read a sensor", "Current value of a sensor", "Measure with a sensor"),
        (text_field("sensor", "name", "sensor_name", "id", values=_spot),),
        (
            "read the {0} sensor", "what does the {0} sensor say?", "check the {0} sensor",
            "what's the {0} sensor reading?", "give me the value of the {0} sensor",
            "what is the reading of the {0} sensor?", "what's the {0} at?", "how is the {0}?",
            "tell me what the {0} sensor shows", "what does {0} measure?", "read {0}",
            "what's the {0}?", "show me the {0} sensor", "ask the {0} sensor",
        ),
        (
            ('{"value": %n}', "The {0} sensor reads %n."),
            ('{"value": %n, "unit": "%u"}', "The {0} sensor reads %n %u."),
            ('{"sensor": "{0}", "value": %n, "unit": "%u"}', "The {0} sensor reads %n %u."),
            ('{"reading": "%n %u"}', "The {0} sensor reads %n %u."),
            ("%n", "The {0} sensor reads %n."), ("%n %u", "The {0} sensor reads %n %u."),
            ('{"error": "%e"}', "That did not work: %e."),
        ),
        frozenset({"ask_sensor"}),
    ),
    Family(
        ("get_weather", "weather", "weather_forecast", "getWeather", "current_weather"),
        ("Weather of a city", "Get the weather", "Forecast for a place"),
        (text_field("city", "location", "place", "town", values=among(_CITIES)),),
        (
            "what's the weather in {0}?", "how is the weather in {0}?", "is it raining in {0}?",
            "tell me the weather in {0}", "what's it like outside in {0}?", "weather in {0}",
            "do I need an umbrella in {0}?", "how warm is it in {0}?", "is it cold in {0}?",
        ),
        (
            ('{"weather": "%y", "degrees": %n}', "In {0}: %y, %n degrees."),
            ('{"temperature": %n, "condition": "%y"}', "In {0}: %y, %n degrees."),
            ('{"temperature": %n}', "In {0}: %n degrees."), ("%y", "In {0}: %y."),
            ("%y, %n degrees", "In {0}: %y, %n degrees."),
            ('{"error": "%e"}', "That did not work: %e."),
        ),
        frozenset({"off_topic"}),
    ),
    Family(
        ("get_time", "current_time", "clock", "getTime", "time_now", "now"),
        ("Current time", "Tell the time", "Time of day"), (),
        (
            "what time is it?", "what's the time?", "tell me the time", "do you know the time?",
            "can you tell me what time it is?", "how late is it?", "give me the time",
        ),
        (
            ('{"time": "%c"}', "It is %c."), ("%c", "It is %c."), ('{"now": "%c"}', "It is %c."),
            ('{"error": "%e"}', "That did not work: %e."),
        ),
        frozenset({"off_topic"}),
    ),
    Family(
        ("set_timer", "start_timer", "timer", "startTimer", "countdown"),
        ("Start a timer", "Set a countdown", "Timer in minutes"),
        (number_field("minutes", "duration", "time", "length", low=1, high=90),),
        (
            "set a timer for {0} minutes", "start a {0} minute timer", "timer for {0} minutes",
            "tell me when {0} minutes are over", "count down {0} minutes", "wake me in {0} minutes",
            "give me {0} minutes", "let me know in {0} minutes", "{0} minute timer",
        ),
        DONE, frozenset({"set_timer"}),
    ),
    Family(
        ("play_music", "play", "start_music", "playMusic", "stream"),
        ("Play music", "Start music by genre, artist or title"),
        (text_field("query", "genre", "song", "music", "title", values=among(MUSIC)),),
        (
            "play {0}", "play some {0}", "put on {0}", "I want to hear {0}", "put some {0} on",
            "let's hear {0}", "how about some {0}?", "start {0}", "I feel like {0}",
        ),
        DONE, frozenset({"play", "play_something", "play_in_room"}),
    ),
    Family(
        ("send_message", "message", "send_text", "sendMessage", "text_person", "notify"),
        ("Send a message", "Write to somebody", "Text a person"),
        (
            text_field("to", "recipient", "person", "contact", values=_name),
            text_field("text", "message", "body", "content", values=among(MESSAGES, 0)),
        ),
        (
            "tell {0}: {1}", "send {0} a message: {1}", "message {0} that {1}", "text {0}: {1}",
            "let {0} know that {1}", "write to {0}: {1}", "tell {0} that {1}",
        ),
        DONE, frozenset({"send_message"}),
    ),
    Family(
        ("call_person", "call", "phone", "start_call", "callContact"),
        ("Call somebody", "Start a phone call"),
        (text_field("person", "name", "contact", "who", values=_name),),
        (
            "call {0}", "phone {0}", "ring {0}", "give {0} a call", "I want to talk to {0}",
            "get {0} on the phone", "put me through to {0}",
        ),
        DONE, frozenset({"call"}),
    ),
    Family(
        ("add_item", "add_to_list", "shopping_list_add", "addItem", "list_add"),
        ("Add to the shopping list", "Put something on the list"),
        (text_field("item", "name", "product", "thing", values=among(GROCERIES)),),
        (
            "add {0} to the shopping list", "put {0} on the list", "we need {0}", "buy {0}",
            "we're out of {0}", "I have to buy {0}", "note {0} on the shopping list",
        ),
        DONE, frozenset({"add_item"}),
    ),
    Family(
        ("set_temperature", "set_heating", "thermostat", "setTemperature", "heat_to"),
        ("Set the temperature of a room", "Heat a room"),
        (
            text_field("room", "zone", "place", "area", values=among(ROOMS)),
            number_field("degrees", "temperature", "value", "target", low=5, high=30),
        ),
        (
            "set the {0} to {1} degrees", "make the {0} {1} degrees", "heat the {0} to {1}",
            "I want {1} degrees in the {0}", "{1} degrees in the {0}",
            "warm the {0} to {1} degrees",
            "set the heating in the {0} to {1}", "the {0} should be at {1} degrees",
        ),
        DONE, frozenset({"climate", "everyday"}),
    ),
    Family(
        ("set_light", "light", "control_light", "setLight", "lamp"),
        ("Set the light of a room", "Change a light"),
        (
            text_field("room", "light", "lamp", "where", values=among(ROOMS)),
            choice_field("state", "mode", "power", "value", words=("on", "off")),
        ),
        (
            "turn {1} the light in the {0}", "turn the {0} light {1}", "switch the {0} light {1}",
            "light {1} in the {0}", "turn the light in the {0} {1}", "{0} light {1}",
        ),
        DONE, frozenset({"lights", "switch", "scenes", "everyday"}),
    ),
    Family(
        ("light_colour", "set_colour", "set_color", "colour_light", "setColor"),
        ("Colour of a light", "Change the colour"),
        (
            text_field("room", "light", "where", values=among(ROOMS)),
            text_field("colour", "color", "value", values=among(COLOURS, 0)),
        ),
        (
            "make the {0} {1}", "turn the {0} {1}", "{1} light in the {0}", "colour the {0} {1}",
            "I want {1} light in the {0}", "change the {0} light to {1}",
        ),
        DONE, frozenset({"lights", "everyday"}),
    ),
    Family(
        ("move_robot", "move", "drive", "goto_room", "navigate", "go_to", "driveTo"),
        ("Send the robot to a room", "Drive to a place"),
        (text_field("room", "place", "goal", "target", "location", values=among(ROOMS)),),
        (
            "go to the {0}", "drive to the {0}", "send the robot to the {0}", "move to the {0}",
            "come to the {0}", "I need you in the {0}", "head to the {0}", "roll to the {0}",
        ),
        DONE, frozenset({"robots", "plans"}),
    ),
    Family(
        ("drive_distance", "move_by", "forward", "move_forward", "step"),
        ("Drive so many centimetres", "Move the robot"),
        (
            choice_field("direction", "way", "dir", words=("forward", "back", "left", "right")),
            number_field("cm", "distance", "length", low=5, high=300),
        ),
        (
            "go {0} {1} cm", "move {0} by {1} cm", "drive {1} cm {0}", "{1} cm {0}", "{0} {1} cm",
            "roll {0} {1} centimetres",
        ),
        DONE, frozenset({"robots", "plans"}),
    ),
    Family(
        ("pick_up", "grasp", "fetch", "take", "pickUp", "grab_object"),
        ("Pick up a thing", "Grasp an object", "Fetch something"),
        (text_field("object", "item", "thing", "name", values=among(ITEMS)),),
        (
            "pick up the {0}", "grab the {0}", "take the {0}", "get me the {0}", "fetch the {0}",
            "bring me the {0}", "can you reach the {0}?",
        ),
        DONE, frozenset({"robots", "plans"}),
    ),
    Family(
        ("add_event", "create_event", "calendar_add", "addEvent", "book"),
        ("Add to the calendar", "Make an appointment"),
        (
            text_field("title", "name", "what", "event", values=among((
                "dentist", "lunch", "meeting", "party", "training", "dinner", "school", "fair"))),
            text_field("day", "date", "when", values=among(DAYS, 0)),
            text_field("time", "at", "start", values=time_of_day),
        ),
        (
            "I have {0} on {1} at {2}", "put {0} in my calendar for {1} at {2}",
            "add {0} on {1} at {2}", "book {0} for {1} at {2}", "{0} on {1} at {2}, note it",
        ),
        DONE, frozenset({"tell_visit"}),
    ),
    Family(
        ("search", "web_search", "lookup", "searchWeb", "find_info"),
        ("Search the web", "Look something up"),
        (text_field("query", "q", "text", "topic", values=among(ITEMS)),),
        (
            "search for {0}", "look up {0}", "find something about {0}", "google {0}",
            "what can you find about {0}?", "search the web for {0}",
        ),
        (
            ('{"result": "%w"}', "I found: %w."), ("%w %w", "I found: %w %w."),
            ('{"results": ["%w", "%w"]}', "I found: %w, %w."), ("[]", "I found nothing."),
            ('{"error": "%e"}', "That did not work: %e."),
        ),
        frozenset({"off_topic"}),
    ),
)  # fmt: skip
