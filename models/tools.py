"""Conversations in which the model may call tools, in the form of Hermes and Qwen3.

Definitions stand in the system turn, calls are JSON between `<tool_call>` markers, results come
back in a turn of the role `tool`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from models.conversations import (
    KINDS,
    Allowed,
    Conversation,
    any_turn,
    mixed_names,
    random_home,
    random_system,
    record,
    voiced,
)
from models.domain import Combination, Context, Turn, likely, weighted
from models.tool_families import (
    DONE,
    ERRORS,
    FAMILIES,
    MEASURES,
    STATES,
    Family,
    Parameter,
    among,
    choice_field,
    number_field,
    text_field,
    time_of_day,
)
from models.vocabulary import (
    COLOURS,
    GROCERIES,
    ITEMS,
    PEOPLE,
    ROOMS,
    compose_word,
)

NO_TOOL: Final = "I have no tool for that."
_TURNS: Final = range(2, 6)


@dataclass(frozen=True)
class Tool:
    """One tool of a conversation: its family, and the names that it has here."""

    family: Family
    name: str
    parameters: tuple[str, ...]
    definition: dict[str, Any]

    def line(self) -> str:
        """Return its definition as the template shows it."""
        return json.dumps(self.definition, ensure_ascii=False)


def as_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


_DO: Final = (
    "find", "start", "check", "create", "delete", "order", "measure", "count", "scan", "print",
    "convert", "book", "track", "rename", "load", "save", "share", "sync", "test", "update", "rate",
    "get", "set", "list", "open", "close", "stop", "send", "show", "reset", "charge", "repair",
)  # fmt: skip
_THINGS: Final = (
    "recipe", "ticket", "invoice", "task", "parcel", "route", "stock", "note", "photo", "pump",
    "valve", "boiler", "tank", "battery", "tariff", "report", "sample", "order", "backup", "filter",
    "meter", "engine", "pool", "car", "door", "file", "account", "table", "drone", "printer",
    "plant", "garden", "video", "score", "menu", "profile", "alarm", "contract", "bill", "machine",
    "wheel",
)  # fmt: skip
_FIELDS: Final = (
    "name", "id", "city", "date", "amount", "title", "level", "size", "colour", "mode", "speed",
    "unit", "weight", "number", "code", "label", "topic", "angle", "depth", "count", "priority",
    "owner", "target", "source", "zone", "language", "user_name", "max_size", "start_date",
)  # fmt: skip
_WORDS: Final = (*ITEMS, *PEOPLE, *ROOMS, *COLOURS, *GROCERIES)


def _field(rng: Random, name: str) -> Parameter:
    kind = rng.choice(("word", "word", "number", "number", "enum", "truth"))
    if kind == "number":
        return number_field(name, low=0, high=rng.choice((9, 99, 999)))
    if kind == "truth":
        return Parameter((name,), "boolean", lambda rng: likely(rng, 0.5))
    if kind == "enum":
        words = tuple({compose_word(rng) if likely(rng, 0.3) else rng.choice(_WORDS)
                       for _ in range(rng.randrange(2, 5))})  # fmt: skip
        return choice_field(name, words=sorted(words))
    return text_field(name, values=among(_WORDS, 0.5))


def _requests(rng: Random, name: str, what: tuple[str, str], fields: Sequence[str]) -> list[str]:
    verb, noun = what
    slots = [f"{field.replace('_', ' ')} {{{index}}}" for index, field in enumerate(fields)]
    if len(slots) > 1 and likely(rng, 0.3):
        rng.shuffle(slots)
    if not slots:
        return [
            f"{verb} the {noun}",
            f"{verb} {noun}",
            f"use {name}",
            f"run {name}",
            f"call {name}",
        ]
    *first, last = slots
    told = f"{', '.join(first)} and {last}" if first else last
    ways = [f"{verb} the {noun} with {told}", f"{verb} {noun}, {', '.join(slots)}"]
    ways += [f"{verb} a {noun}: {', '.join(slots)}", f"use {name} with {told}", f"{name}: {told}"]
    if len(slots) == 1:
        ways += [f"{verb} the {noun} {{0}}", f"{verb} {noun} {{0}}", f"{verb} {{0}} as {noun}"]
        ways += [f"{verb} the {noun} for {{0}}", f"I need to {verb} the {noun} {{0}}"]
    return ways


def made_up(rng: Random) -> Family:
    """Return a tool that nobody knows, with its names in its requests."""
    verb, noun = rng.choice(_DO), rng.choice(_THINGS)
    if likely(rng, 0.5):
        verb, noun = (compose_word(rng) if likely(rng, 0.7) else word for word in (verb, noun))
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}",
                       f"{noun}_{verb}", f"{noun}-{verb}"))  # fmt: skip
    pool = [compose_word(rng) if likely(rng, 0.3) else field for field in rng.sample(_FIELDS, 4)]
    fields = list(dict.fromkeys(pool))[: rng.choice((0, 1, 1, 1, 2, 2, 3))]
    shown = rng.choice(_FIELDS)
    results = (
        ('{"result": "%w"}', "The result is %w."), ('{"result": %n}', "The result is %n."),
        (f'{{"{shown}": %n}}', f"The {shown.replace('_', ' ')} is %n."),
        (f'{{"{shown}": "%w"}}', f"The {shown.replace('_', ' ')} is %w."),
        ("%w", "The result is %w."), ("%n", "The result is %n."),
    )  # fmt: skip
    return Family(
        (name,),
        (f"{verb.capitalize()} the {noun}", f"{verb.capitalize()} a {noun}"),
        tuple(_field(rng, field) for field in fields),
        tuple(_requests(rng, name, (verb, noun), fields)),
        (*results, *DONE) if likely(rng, 0.5) else results,
    )


def sensors(rng: Random) -> Family:
    """Return a tool that reads a few sensors, mostly listed in its definition."""
    base, joined = FAMILIES[0], rng.choice((" ", " ", "_"))
    measures = rng.sample(tuple(MEASURES), rng.randrange(1, 4))
    rooms = rng.sample(ROOMS, rng.randrange(2, 5))
    rooms = [compose_word(rng) if likely(rng, 0.2) else room for room in rooms]
    alone = likely(rng, 0.4)
    if alone:
        names = [room.replace(" ", joined) for room in rooms]
        asked = (
            *(f"what's the {one} in the {{0}}?" for one in measures), "read the {0} sensor",
            "how is it in the {0}?", "check the {0}", "how warm is it in the {0}?",
            "is it warm in the {0}?", "what does the sensor in the {0} say?",
            "tell me the temperature in the {0}", "how humid is it in the {0}?",
            "what's the {0} sensor at?", "{0} temperature?", "how cold is it in the {0}?",
        )  # fmt: skip
    else:
        pairs = [f"{room} {one}" for room in rooms for one in measures]
        names = [pair.replace(" ", joined) for pair in rng.sample(pairs, min(len(pairs), 5))]
        asked = (
            "what's the {m} in the {r}?", "read the {r} {m}", "tell me the {m} in the {r}",
            "what's the {r} {m}?", "how's the {m} in the {r}?", "check the {m} of the {r}",
            "give me the {r} {m}", "{r} {m}, please", "I'd like to know the {m} in the {r}",
        )  # fmt: skip
    words = tuple(dict.fromkeys(names))
    listed = likely(rng, 0.7) or joined == "_"
    parameter = choice_field(*base.parameters[0].names, words=words)._replace(fixed=listed)
    return base._replace(parameters=(parameter,), asked=asked)


_DEVICE: Final = ("device", "device", "name", "target", "device_name", "entity")
_STATE: Final = Family(
    ("get_state", "get_device_state", "device_state", "getState", "get_status", "check_device"),
    ("State of a device", "Get the state of a device", "Ask a device for its state"),
    (text_field(*_DEVICE, values=lambda rng: mixed_names(rng)(rng, rng.choice(KINDS))),),
    (
        "what's the state of the {0}?", "is the {0} on?", "is the {0} off?", "check the {0}",
        "how is the {0}?", "what is the {0} doing?", "tell me the state of the {0}",
        "is the {0} locked?", "is the {0} open?", "did I leave the {0} on?", "what about the {0}?",
        "is the {0} still on?", "what's the status of the {0}?", "what is the {0} set to?",
    ),
    (
        ('{"state": "%s"}', "The {0} is %s."),
        ('{"device": "{0}", "state": "%s"}', "The {0} is %s."),
        ("%s", "The {0} is %s."), ('{"error": "%e"}', "That did not work: %e."),
    ),
    frozenset({"ask_state", "ask_on", "ask_locked", "ask_open", "ask_playing", "ask_set",
               "ask_sensor"}),
)  # fmt: skip
_CONTROL: Final = Family(
    ("set_device", "control_device", "device_action", "setDevice", "switch_device", "execute"),
    ("Control a device", "Let a device do something", "Action on a device"),
    (
        text_field(*_DEVICE, values=among(_WORDS)),
        text_field("action", "action", "command", "operation", "do", values=among(_WORDS)),
        Parameter(("value", "value", "amount", "argument", "level"), "string", among(_WORDS)),
    ),
    (), (), frozenset({"action"}),
)  # fmt: skip
_SHORT: Final = {
    "turn_on": "on", "turn_off": "off", "open": "open", "close": "close", "lock": "lock",
    "unlock": "unlock", "set_temperature": "set", "dim": "dim", "pause": "pause", "play": "play",
}  # fmt: skip


def _definition(rng: Random, family: Family, name: str, names: Sequence[str]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for parameter, field in zip(family.parameters, names, strict=True):
        shape: dict[str, Any] = {"type": parameter.kind}
        if family is _CONTROL and parameter is family.parameters[-1]:
            shape["type"] = rng.choice(("number", "integer", "string"))
        elif parameter.fixed:
            shape["enum"] = sorted({str(parameter.values(Random(seed))) for seed in range(40)})
            rng.shuffle(shape["enum"])
        elif likely(rng, 0.15):
            shape["description"] = f"The {field.replace('_', ' ')}"
        properties[field] = shape
    needed = list(names[:-1] if family is _CONTROL else names)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if needed and likely(rng, 0.85):
        schema["required"] = needed
    function: dict[str, Any] = {"name": name}
    if likely(rng, 0.75):
        function["description"] = rng.choice(family.does)
    if names or likely(rng, 0.5):
        function["parameters"] = schema
    return {"type": "function", "function": function}


def make_tool(rng: Random, family: Family) -> Tool:
    """Return a tool of this family with names of its own."""
    name = rng.choice(family.names[:2] if likely(rng, 0.3) else family.names)
    if likely(rng, 0.1):
        name = f"{compose_word(rng)}_{name}"
    names: list[str] = []
    for parameter in family.parameters:
        field = rng.choice(parameter.names)
        names.append(f"{field}{len(names)}" if field in names else field)
    return Tool(family, name, tuple(names), _definition(rng, family, name, names))


def _with_actions(rng: Random, tool: Tool) -> tuple[Tool, dict[str, str]]:
    """Return a tool for devices whose definition lists its actions, and their names by ours."""
    known = dict(_SHORT) if likely(rng, 0.5) else {name: name for name in _SHORT}
    if likely(rng, 0.4):
        known = {name: known[name] for name in ("turn_on", "turn_off")}
    definition: dict[str, Any] = json.loads(json.dumps(tool.definition))
    schema = definition["function"]["parameters"]
    schema["properties"][tool.parameters[1]]["enum"] = list(known.values())
    return Tool(tool.family, tool.name, tool.parameters, definition), known


class Kit(NamedTuple):
    """The tools of a conversation, and the names of actions of the tool for devices, if listed."""

    tools: tuple[Tool, ...]
    actions: dict[str, str] | None

    def lines(self) -> tuple[str, ...]:
        """Return the definitions as the template shows them."""
        return tuple(tool.line() for tool in self.tools)

    def of(self, family: Family) -> Tool | None:
        """Return the tool of a family."""
        return next((tool for tool in self.tools if tool.family is family), None)

    def takes(self, turn: Turn) -> bool:
        """Return whether a tool takes over what this turn is about."""
        covered = frozenset().union(*(tool.family.covers for tool in self.tools))
        return turn.intent == "off_topic" or turn.intent in covered or turn.group in covered


def make_kit(rng: Random) -> Kit:
    """Return one to five tools, some of them for devices, some made up."""
    families = rng.sample(FAMILIES, rng.randrange(3))
    if likely(rng, 0.2):
        families = [*(one for one in families if one is not FAMILIES[0]), sensors(rng)]
    families += [made_up(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    if likely(rng, 0.35) and not any(family.covers & _OF_DEVICES for family in families):
        families.append(_CONTROL)
    if likely(rng, 0.3) or not families:
        families.append(_STATE)
    rng.shuffle(families)
    tools = [make_tool(rng, family) for family in families]
    actions = None
    for index, tool in enumerate(tools):
        if tool.family is _CONTROL and likely(rng, 0.5):
            tools[index], actions = _with_actions(rng, tool)
    return Kit(tuple({tool.name: tool for tool in tools}.values()), actions)


_OF_DEVICES: Final = frozenset({"climate", "lights", "switch", "robots", "play"})


def _filled(text: str, slots: Sequence[str]) -> str:
    if "{m}" in text:
        room, _, measure = slots[0].rpartition(" ")
        text = text.replace("{r}", room).replace("{m}", measure)
    for index, value in enumerate(slots):
        text = text.replace(f"{{{index}}}", value)
    return text


def _result(rng: Random, pair: tuple[str, str], slots: Sequence[str]) -> tuple[str, str]:
    result, reply = (_filled(text, slots) for text in pair)
    measure = rng.choice(tuple(MEASURES.values()))
    found: list[tuple[str, Callable[[], str]]] = [
        ("%n", lambda: str(rng.randrange(100)) if likely(rng, 0.7) else f"{rng.random() * 50:.1f}"),
        ("%u", lambda: measure),
        ("%w", lambda: compose_word(rng) if likely(rng, 0.5) else rng.choice(_WORDS)),
        ("%y", lambda: rng.choice(("rain", "sun", "snow", "clouds", "fog", "wind", "storm"))),
        ("%c", lambda: time_of_day(rng)),
        ("%s", lambda: rng.choice(STATES)),
        ("%e", lambda: rng.choice(ERRORS)),
    ]
    for mark, value in found:
        while mark in result:
            one = value()
            result, reply = result.replace(mark, one, 1), reply.replace(mark, one, 1)
    return result, reply


def _is_fixed(tool: Tool, index: int) -> bool:
    return tool.family.parameters[index].fixed


def family_turn(rng: Random, tool: Tool) -> Turn | None:
    """Return a request that a tool serves, the call, its result and the answer to that."""
    family = tool.family
    if not family.asked:
        return None
    values = [parameter.values(rng) for parameter in family.parameters]
    slots = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    slots = [
        value.replace("_", " ") if _is_fixed(tool, i) else value for i, value in enumerate(slots)
    ]
    told = any(name in {"text", "message", "body", "content"} for name in tool.parameters)
    user = voiced(rng, _filled(rng.choice(family.asked), slots), told=told)
    answer = as_call(tool.name, dict(zip(tool.parameters, values, strict=True)))
    pair = rng.choice(family.results)
    if pair[0].count("%e") and likely(rng, 0.6):
        pair = family.results[0]
    result, reply = _result(rng, pair, slots)
    first, *rest = slots or [""]
    combination = Combination(f"tool:{family.names[0]}", first, "|".join(rest))
    return Turn("tool", "tools", user, answer, combination, (), None, (result,), reply)


def two_calls_turn(rng: Random, kit: Kit) -> Turn | None:
    """Return two requests in one message, answered by two calls."""
    tools = [tool for tool in kit.tools if tool.family is not _STATE]
    parts = [family_turn(rng, rng.choice(tools)) for _ in range(2)] if tools else [None, None]
    first, second = parts
    if first is None or second is None or "?" in first.user + second.user:
        return None
    texts = [part.user.rstrip(".") for part in (first, second)]
    texts[1] = texts[1][0].lower() + texts[1][1:]
    reply = f"{first.reply} {second.reply}"
    if first.reply == second.reply:
        reply = first.reply
    return first._replace(
        user=" and ".join(texts),
        answer=f"{first.answer}\n{second.answer}",
        steps=(first.combination, second.combination),
        results=(*first.results, *second.results),
        reply=reply,
    )


def without_tool_turn(rng: Random, kit: Kit) -> Turn | None:
    """Return a request for a tool that is not there, and the refusal."""
    family = rng.choice(FAMILIES) if likely(rng, 0.4) else made_up(rng)
    if family in FAMILIES and "off_topic" not in family.covers:
        return None
    if any(family.names[0] == tool.family.names[0] for tool in kit.tools):
        return None
    turn = family_turn(rng, make_tool(rng, family))
    if turn is None:
        return None
    return turn._replace(answer=NO_TOOL, results=(), reply="")


def missing_value_turn(rng: Random, tool: Tool) -> Turn | None:
    """Return a request that leaves out the tool's only value, and the question for it."""
    if len(tool.parameters) != 1 or not tool.family.asked or tool.family in FAMILIES:
        return None
    plain = [text for text in tool.family.asked if text.endswith(" {0}") and ":" not in text]
    cut = [text.removesuffix(" {0}") for text in plain]
    cut = [text for text in cut if not text.endswith((" with", " for", " as"))]
    cut = [text.partition(" with ")[0] for text in cut]
    if not cut:
        return None
    user = voiced(rng, rng.choice(cut))
    answer = f"Which {tool.parameters[0].replace('_', ' ')}?"
    return Turn("value", "tools", user, answer, Combination("value", tool.name, ""), ())


def _on_devices(rng: Random, kit: Kit, tool: Tool, turn: Turn) -> Turn | None:
    """Return a turn with actions as one with calls of the tool for devices."""
    found = json.loads(turn.answer)
    steps = found if isinstance(found, list) else [found]
    schema = tool.definition["function"]["parameters"]
    text = schema["properties"][tool.parameters[-1]]["type"] == "string"
    calls = []
    for step in steps:
        fields = list(step.values())
        if "device" not in step or len(fields) > len(tool.parameters):
            return None
        action = fields[0] if kit.actions is None else kit.actions.get(fields[0])
        if action is None:
            return turn._replace(answer=NO_TOOL, pending=None)
        values = [fields[1], action, *(str(field) if text else field for field in fields[2:])]
        calls.append(as_call(tool.name, dict(zip(tool.parameters, values, strict=False))))
    pair = rng.choice(DONE[:5] if len(calls) > 1 or likely(rng, 0.8) else DONE)
    made = [_result(rng, pair, ()) for _ in calls]
    return turn._replace(
        answer="\n".join(calls), results=tuple(one for one, _ in made), reply=made[-1][1]
    )


def _on_state(rng: Random, tool: Tool, turn: Turn) -> Turn:
    """Return a question for a listed state as one that the tool answers."""
    device, state = turn.combination.device, turn.combination.value
    result = rng.choice((state, f'{{"state": "{state}"}}',
                         f'{{"device": "{device}", "state": "{state}"}}'))  # fmt: skip
    call = as_call(tool.name, {tool.parameters[0]: device})
    return turn._replace(answer=call, results=(result,), reply=turn.answer)


_WAYS: Final = {"call": 0.4, "two": 0.05, "none": 0.1, "value": 0.05, "base": 0.4}


def tool_turn(rng: Random, kit: Kit, context: Context, allowed: Allowed) -> Turn | None:
    """Return a turn of a conversation with these tools, or None where this one does not fit."""
    way = weighted(rng, _WAYS)
    if way == "call":
        tool = rng.choice(kit.tools)
        return None if tool.family is _STATE and context.listed else family_turn(rng, tool)
    if way == "two":
        return two_calls_turn(rng, kit)
    if way == "none":
        return without_tool_turn(rng, kit)
    if way == "value":
        return missing_value_turn(rng, rng.choice(kit.tools))
    return _base_turn(rng, kit, any_turn(rng, context, allowed))


def _base_turn(rng: Random, kit: Kit, turn: Turn) -> Turn | None:
    control, state = kit.of(_CONTROL), kit.of(_STATE)
    if state is not None and turn.intent in _STATE.covers:
        listed = turn.combination.value and turn.answer.startswith(("The ", "Yes, ", "No, "))
        return _on_state(rng, state, turn) if listed else None
    if control is not None and turn.answer.startswith(("{", "[")) and '"device"' in turn.answer:
        return _on_devices(rng, kit, control, turn)
    return None if kit.takes(turn) else turn


def tool_conversation(rng: Random, allowed: Allowed, trained: Allowed) -> Conversation:
    """Return a conversation with tools: of `allowed` turns where no tool is called, all trained."""
    kit = make_kit(rng)
    devices = random_home(rng, rng.randrange(2, 11), mixed_names(rng))
    context = Context(devices, listed=likely(rng, 0.6))
    system = random_system(rng, context)
    turns: list[Turn] = []
    wanted = rng.choice(_TURNS)
    while len(turns) < wanted:
        turn = tool_turn(rng, kit, context, allowed)
        if turn is None or not trained(turn):
            continue
        record(turn, context)
        turns.append(turn)
    return Conversation(system, tuple(turns), kit.lines())
