"""Conversations with tools of the catalogue: calls, answers from results, and what no tool does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from models.domain import Combination, Turn, likely
from models.speech.catalogue import CATALOGUE, MONEY, Entry, family_of
from models.speech.commands import said
from models.speech.homes import PLACES
from models.speech.results import FIELDS
from models.speech.voice import (
    RELATIVES,
    said_minutes,
    said_number,
    said_time,
    small,
    upper,
    voiced,
)
from models.tool_families import DONE, ERRORS, Family, number_field, text_field
from models.tools import NO_TOOL, Tool, as_call, made_up, make_tool
from models.vocabulary import DISHES, compose_word

_CURRENCY: Final = Family(
    ("convert_currency", "currency", "exchange"),
        ("Convert an amount of money between currencies", "Exchange rates"),
    (number_field("amount", "amount", "value", low=1, high=900), text_field("source", "source",
        "from", "base", values=lambda rng: rng.choice(list(MONEY))),
     text_field("target", "target", "to", "currency", values=lambda rng: rng.choice(list(MONEY)))),
    ("convert {0} {1} to {2}", "{0} {1} in {2}",
        "what are {0} {1} in {2}?", "change {0} {1} into {2}",
        "how many {2} do I get for {0} {1}?"), (), frozenset({"off_topic"}),
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A tool of a conversation, and the names of the fields that it may give back."""

    tool: Tool
    fields: tuple[tuple[str, ...], ...]


def _one(rng: Random, entry: Entry) -> Known:
    tool = make_tool(rng, family_of(rng, entry))
    return Known(tool, tuple(tuple(group.split(",")) for group in entry.fields.split()))


def kit(rng: Random) -> list[Known]:
    """Return one to five tools with distinct names."""
    count = rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4, 5))
    found = [_one(rng, entry) for entry in rng.sample(CATALOGUE, count)]
    if likely(rng, 0.08):
        found.append(Known(make_tool(rng, _CURRENCY), (("result",),)))
    if likely(rng, 0.1):
        found.append(Known(make_tool(rng, made_up(rng)), ()))
    rng.shuffle(found)
    return list({known.tool.name: known for known in found}.values())


def covers(known: Sequence[Known]) -> frozenset[str]:
    """Return the intents and groups that these tools take over."""
    return frozenset().union(*(one.tool.family.covers for one in known))


_PETS: Final = ("dog", "cat", "rabbit", "parrot", "hamster", "puppy", "kitten", "pony", "fish")


def _filled(rng: Random, text: str) -> str:
    for mark, words in (("{rel}", RELATIVES), ("{dish}", DISHES), ("{pet}", _PETS)):
        text = text.replace(mark, rng.choice(words))
    return text


def _request(rng: Random, tool: Tool, values: Sequence[Any]) -> tuple[str, bool]:
    """Return a request with these values, and whether it ends with words that are passed on."""
    text = _filled(rng, rng.choice(tool.family.asked))
    told = any(name in {"text", "message", "body", "content", "note"} for name in tool.parameters)
    for index, value in enumerate(values):
        slot, parameter = f"{{{index}}}", tool.family.parameters[index]
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if tool.family is _CURRENCY and index:
            shown = MONEY[shown] if likely(rng, 0.75) else shown
        elif "minutes" in parameter.names:
            text = said_minutes(rng, text.replace(slot, "{minutes}"), shown)
            continue
        elif "time" in parameter.names and "at" in parameter.names:
            shown = said_time(rng, shown)
        elif isinstance(value, int) and not isinstance(value, bool):
            shown = said_number(rng, shown)
        elif parameter.fixed:
            shown = shown.replace("_", " ")
        text = text.replace(slot, shown)
    return text, told


def _values(rng: Random, tool: Tool) -> list[Any]:
    values = [one.values(rng) for one in tool.family.parameters]
    if tool.family is _CURRENCY:
        while values[1] == values[2]:
            values[2] = tool.family.parameters[2].values(rng)
    for index, parameter in enumerate(tool.family.parameters):
        if "minutes" in parameter.names and likely(rng, 0.4):
            values[index] = rng.choice((30, 60, 15, 5, 10, 20, 45, 90))
    return values


class _Result:
    """A result of a call: its text, and the fields with their names."""

    def __init__(self, rng: Random, groups: tuple[tuple[str, ...], ...]) -> None:
        self.fields: dict[str, tuple[str, Any]] = {}
        for key in rng.choice(groups) if groups else ():
            names, value, _ = FIELDS[key]
            self.fields[key] = (rng.choice(names), value(rng))
        shown = dict(self.fields.values())
        self.text = json.dumps(shown, ensure_ascii=False)
        if (
            len(shown) == 1
            and likely(rng, 0.15)
            and not isinstance(next(iter(shown.values())), list)
        ):
            self.text = str(next(iter(shown.values())))


def _told(name: str, value: Any) -> str:
    """Return a field in words."""
    label = name.replace("_", " ")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(f"{next(iter(one.values()))}: {list(one.values())[1]}" for one in value)
    if isinstance(value, list):
        return f"the {label} are {', '.join(map(str, value))}" if value else f"there are no {label}"
    return f"the {label} is {value}"


def reply_of(result: _Result, keys: Sequence[str] = ()) -> str:
    """Return the answer that tells fields of a result, all where none is named."""
    told = [_told(*result.fields[key]) for key in keys or result.fields]
    return f"{upper(', '.join(told))}."


def _combination(tool: Tool, values: Sequence[Any]) -> Combination:
    first, *rest = [str(value) for value in values] or [""]
    return Combination(f"tool:{tool.family.names[0]}", first, "|".join(rest))


def call_turns(rng: Random, known: Known) -> list[Turn]:
    """Return a request, its call and result, and at times questions about the result."""
    tool = known.tool
    if not tool.family.asked:
        return []
    values = _values(rng, tool)
    text, told = _request(rng, tool, values)
    user = voiced(rng, text, [str(value) for value in values], told=told, plain=0.62)
    answer = as_call(tool.name, dict(zip(tool.parameters, values, strict=True)))
    result = _Result(rng, known.fields)
    combination = _combination(tool, values)
    if not result.fields or likely(rng, 0.06):
        pair = rng.choice(DONE)
        error = rng.choice(ERRORS)
        made = (pair[0].replace("%e", error), pair[1].replace("%e", error))
        return [Turn("tool", "tools", user, answer, combination, (), None, (made[0],), made[1])]
    silent = likely(rng, 0.3)
    reply = "" if silent else reply_of(result)
    turns = [Turn("tool", "tools", user, answer, combination, (), None, (result.text,), reply)]
    asked = rng.sample(list(result.fields), min(len(result.fields), rng.randrange(1, 3)))
    if silent and likely(rng, 0.2):
        turns.append(said("result", rng.choice(_WELL), reply_of(result)))
    elif silent or likely(rng, 0.35):
        for key in asked:
            question = rng.choice(FIELDS[key][2])
            if likely(rng, 0.3):
                head = rng.choice(("and", "so", "OK,", "well,", "tell me,", "hm,", "right,"))
                question = f"{head} {question}"
            turns.append(said("result", upper(question), reply_of(result, (key,))))
    return turns


_WELL: Final = (
    "Well?", "And?", "So?", "Tell me.", "So, what is it?", "What does it say?",
        "What did you find?", "Now what is it?",
    "And what's the answer?", "Let me hear it.", "What came out?", "So what's the result?",
        "Go on, tell me.", "What have you got?",
)  # fmt: skip


class _Part(NamedTuple):
    """One of the calls of a message: the call, its combination, its result and the answer."""

    call: str
    combination: Combination
    result: str
    reply: str


def _calls(user: str, parts: Sequence[_Part]) -> Turn:
    return Turn(
        "tool",
        "tools",
        user,
        "\n".join(part.call for part in parts),
        parts[0].combination,
        tuple(part.combination for part in parts),
        None,
        tuple(part.result for part in parts),
        " ".join(dict.fromkeys(part.reply for part in parts)),
    )


_ONE_TEXT: Final = frozenset({"text", "message", "body", "content", "note", "time"})


def _twice_asked(rng: Random, tool: Tool, index: int, words: tuple[str, str]) -> str:
    """Return a request that names two values of a parameter, its other slots not filled."""
    slot = f"{{{index}}}"
    asked = [one for one in tool.family.asked if slot in one]
    if not asked:
        return ""
    text = rng.choice(asked)
    before = next((one for one in ("in the", "of the", "in", "the") if f"{one} {slot}" in text), "")
    first, second = words
    joined = f"{first} and {second}"
    if before and likely(rng, 0.35):
        joined = f"{first} and {before} {second}"
    if "?" in text and len(tool.parameters) == 1 and likely(rng, 0.05):
        return f"compare the {tool.family.names[0].split('_')[-1]} for {joined}"
    text = text.replace(slot, joined)
    if "?" in text:
        return f"I need both: {text}" if likely(rng, 0.05) else text
    return text + rng.choice(_BOTH) if likely(rng, 0.1) else text


_BOTH: Final = (", both of them", ", one after the other", " separately", ", please, both")


def same_twice(rng: Random, known: Known) -> list[Turn]:
    """Return a request for a tool with two values, and its two calls."""
    tool = known.tool
    if not tool.parameters or not tool.family.asked or tool.family is _CURRENCY:
        return []
    first, second = _values(rng, tool), _values(rng, tool)
    index = rng.randrange(len(first))
    parameter = tool.family.parameters[index]
    if parameter.kind != "string" or tool.parameters[index] in _ONE_TEXT:
        return []
    second = [*first[:index], second[index], *first[index + 1 :]]
    a, b = (str(one[index]) for one in (first, second))
    if parameter.fixed:
        a, b = a.replace("_", " "), b.replace("_", " ")
    text = _twice_asked(rng, tool, index, (a, b))
    if a == b or not text:
        return []
    for place, value in enumerate(first):
        text = text.replace(f"{{{place}}}", str(value))
    user = voiced(rng, _filled(rng, text), (a, b), plain=0.75)
    if a not in user or b not in user:
        return []
    parts = [_part(rng, known, values) for values in (first, second)]
    if parts[0].reply != "Done.":
        named = zip((a, b), parts, strict=True)
        parts = [part._replace(reply=f"{name}: {part.reply}") for name, part in named]
    return [_calls(user, parts)]


def _part(rng: Random, known: Known, values: Sequence[Any]) -> _Part:
    tool = known.tool
    result = _Result(rng, known.fields)
    call = as_call(tool.name, dict(zip(tool.parameters, values, strict=True)))
    text, reply = (result.text, reply_of(result)) if result.fields else ("ok", "Done.")
    return _Part(call, _combination(tool, values), text, reply)


def _of_city(tool: Tool) -> bool:
    parameters = tool.family.parameters
    return len(parameters) == 1 and "city" in parameters[0].names


def two_tools(rng: Random, tools: Sequence[Known]) -> list[Turn]:
    """Return a message with requests for two tools, and the two calls."""
    if len(tools) < 2 or not all(known.tool.family.asked for known in tools):
        return []
    first, second = rng.sample(list(tools), 2)
    values, others = _values(rng, first.tool), _values(rng, second.tool)
    there = _of_city(first.tool) and _of_city(second.tool)
    others = values if there else others
    text, told = _request(rng, first.tool, values)
    other, _ = _request(rng, second.tool, others)
    if told:
        return []
    if there and likely(rng, 0.7):
        other = other.replace(f"in {others[0]}", "there")
    mark = rng.choice(
        (" and ", " and ", ", and ", " and then ", "? And ", ", then ", "? Also, ", "; ")
    )
    if "?" in mark and not text.endswith("?"):
        mark = mark.replace("?", ".")
    kept = [str(value) for value in (*values, *others)]
    user = voiced(rng, f"{text.rstrip('?')}{mark}{small(other)}", kept, plain=0.8, told=True)
    return [_calls(user, [_part(rng, first, values), _part(rng, second, others)])]


def none_turn(rng: Random, tools: Sequence[Known]) -> list[Turn]:
    """Return a request that no tool serves, or whose value a tool does not list."""
    listed = [
        one
        for one in tools
        if any(p.fixed for p in one.tool.family.parameters) and len(one.tool.parameters) == 1
    ]
    if listed and likely(rng, 0.5):
        known = rng.choice(listed)
        schema = known.tool.definition["function"].get("parameters", {})
        enum = {
            word
            for shape in schema.get("properties", {}).values()
            for word in shape.get("enum", ())
        }
        other = compose_word(rng) if likely(rng, 0.3) else rng.choice(PLACES)
        if {"state", "on"} & enum or any(other in word or word in other for word in enum):
            return []
        if not known.tool.family.asked:
            return []
        text, _ = _request(rng, known.tool, [other])
        return [said("no tool", voiced(rng, text, (other,), plain=0.75), NO_TOOL)]
    entry = rng.choice(CATALOGUE)
    mine = {name for one in tools for name in one.tool.family.names}
    family = family_of(rng, entry)
    if "off_topic" not in family.covers or mine & set(family.names) or "talk" in family.covers:
        return []
    stems = {name.split("_")[-1] for name in mine} | {name.split("_")[0] for name in mine}
    if stems & {part for name in family.names for part in name.split("_")} - {"get"}:
        return []
    tool = make_tool(rng, family)
    text, told = _request(rng, tool, _values(rng, tool))
    return [said("no tool", voiced(rng, text, plain=0.75, told=told), NO_TOOL)]


def some_turns(rng: Random, tools: Sequence[Known]) -> list[Turn]:
    """Return the turns of one topic of a conversation with these tools."""
    way = rng.random()
    if way < 0.66:
        return call_turns(rng, rng.choice(tools))
    if way < 0.77:
        return same_twice(rng, rng.choice(tools))
    if way < 0.87:
        return two_tools(rng, tools)
    return none_turn(rng, tools)
