"""Sentences of a file, and whether answers to them are right.

A line is a JSON object: `user`, `expect`, and where wanted `devices` (lines of the list, or objects
of name, kind, room and state), `tools` (definitions), `before` (earlier messages), `system`.

`expect` is an action or a list of actions, in any order; `{"tool": name, "arguments": {...}}` or a
list of those; "refuse"; "ask"; or words that the answer has, one text or a list of which it has
all, and where they are names of devices no other listed device. Case, articles and punctuation at
the end do not count, and "two" is 2 in words. A fetch, patrol or tidy may also be its plan.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from models.conversations import HEADS, Message, system_prompt
from models.domain import Context, Device, Draw
from models.intents import INTENTS

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_REFUSES: Final = re.compile(
    r"\b(cannot|can't|can not|no|not|nothing|don't|doesn't|unable|only know|sorry|isn't|aren't)\b",
    re.IGNORECASE,
)

_ERRANDS: Final = {i.name: i for i in INTENTS if i.name in {"fetch", "patrol", "tidy"}}
_ARTICLES: Final = re.compile(r"\b(the|an|a)\b", re.IGNORECASE)
_NUMBERS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)


class Sentence(NamedTuple):
    """A chat that ends with the sentence, its tools as JSON lines, and what is expected."""

    messages: list[Message]
    tools: tuple[str, ...]
    expect: Any
    devices: tuple[str, ...] = ()


def _device_line(device: str | dict[str, str]) -> str:
    if isinstance(device, dict):
        fields = ("name", "kind", "room", "state")
        return system_prompt("", [Device(*(device[field] for field in fields))]).splitlines()[-1]
    return device if device.startswith("- ") else f"- {device}"


def _tool_line(tool: dict[str, Any]) -> str:
    whole = tool if "function" in tool else {"type": "function", "function": tool}
    return json.dumps(whole, ensure_ascii=False)


def read_sentences(path: Path) -> list[Sentence]:
    """Return the sentences of a file. Raises ValueError, with the line's number, for others."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_sentence(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is no sentence: {error!r}") from error
    return found


def _sentence(fields: Any) -> Sentence:
    if not isinstance(fields, dict):
        raise TypeError("not an object")
    known = {"devices", "tools", "before", "system", "user", "expect"}
    if unknown := set(fields) - known:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    devices = [_device_line(device) for device in fields.get("devices") or ()]
    head = fields.get("system", HEADS[0] if devices else "")
    system = "\n".join([head, "Devices:", *devices]) if devices else head
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += fields.get("before") or ()
    messages.append({"role": "user", "content": fields["user"]})
    tools = tuple(map(_tool_line, fields.get("tools") or ()))
    names = tuple(line[2:].partition(" (")[0] for line in devices)
    return Sentence(messages, tools, fields["expect"], names)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _plain(value: Any) -> Any:
    """Return a value whose texts lack case, articles and punctuation at the end."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, str):
        return value
    return " ".join(_ARTICLES.sub(" ", value.lower()).split()).rstrip(" .!?,;:")


def _has(answer: str, words: str) -> bool:
    """Return whether an answer has these words whole: 2 is not in 20, nor `locked` in unlocked."""

    def counted(text: str) -> str:
        numbers = {word: str(number) for number, word in enumerate(_NUMBERS)}
        return re.sub(r"[a-z]+", lambda word: numbers.get(word[0], word[0]), _plain(text))

    return bool(re.search(rf"(?<!\w){re.escape(counted(words))}(?![.,:]?\w)", counted(answer)))


def calls_of(answer: str) -> list[Any]:
    """Return the calls of an answer, an empty one for each that is no JSON."""
    return [_parsed(text) for text in _CALL.findall(answer)]


def actions_of(answer: str) -> list[Any]:
    """Return the actions of an answer, none where it is no JSON."""
    found = _parsed(answer) or []
    return found if isinstance(found, list) else [found]


def _same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    rest = _plain(list(found))
    for one in _plain(list(wanted)):
        if one not in rest:
            return False
        rest.remove(one)
    return not rest


def _as_plan(step: dict[str, Any]) -> list[Any]:
    """Return the steps of an errand, or the one step that is none."""
    intent = _ERRANDS.get(str(step.get("action")))
    if intent is None or {"action", *(key for key, _ in intent.slots)} != set(step):
        return [step]
    draw = Draw(Random(0), Context((), listed=False), {key: str(step[key]) for key in step})
    return actions_of(intent.answer(intent, draw).text)


def strays_of(answer: str, sentence: Sentence) -> list[str]:
    """Return the devices of actions that are not in the list, and values that no tool lists."""
    acted = [one.get("device") for one in actions_of(answer) if isinstance(one, dict)]
    found = [str(name) for name in acted if name and name not in sentence.devices]
    shapes = {}
    for line in sentence.tools:
        function = json.loads(line)["function"]
        shapes[function["name"]] = function.get("parameters", {}).get("properties", {})
    for call in filter(lambda one: isinstance(one, dict), calls_of(answer)):
        known, arguments = shapes.get(str(call.get("name")), {}), call.get("arguments")
        for key, value in (arguments if isinstance(arguments, dict) else {}).items():
            if value not in known.get(key, {}).get("enum", [value]):
                found.append(str(value))
    return found if sentence.devices or sentence.tools else []


def is_right(answer: str, expect: Any, devices: Sequence[str] = ()) -> bool:
    """Return whether an answer is what was expected in a home with these devices."""
    answer = answer.strip()
    wanted = expect if isinstance(expect, list) else [expect]
    calls, actions = calls_of(answer), actions_of(answer)
    if all(isinstance(one, dict) and "tool" in one for one in wanted):
        named = [{"name": one["tool"], "arguments": one.get("arguments", {})} for one in wanted]
        return _same(calls, named)
    if all(isinstance(one, dict) for one in wanted):
        plans = [step for one in wanted for step in _as_plan(one)]
        return not calls and (_same(actions, wanted) or _same(actions, plans))
    if calls or any(isinstance(one, dict) for one in actions):
        return False
    if expect in ("ask", "refuse"):
        asks = answer.endswith("?")
        return asks if expect == "ask" else bool(_REFUSES.search(answer)) and not asks
    if set(wanted) <= set(devices) and any(_has(answer, d) for d in set(devices) - set(wanted)):
        return False
    return all(_has(answer, str(word)) for word in wanted)


def kind_of(sentence: Sentence) -> str:
    """Return the group under which a sentence is counted."""
    expect = sentence.expect
    one = expect[0] if isinstance(expect, list) and expect else expect
    if isinstance(one, dict):
        kind = "tools" if "tool" in one else "actions"
        return f"{kind}, several" if isinstance(expect, list) else kind
    if expect in ("ask", "refuse"):
        return str(expect)
    roles = {message["role"] for message in sentence.messages}
    return "results" if "tool" in roles else "memory" if "assistant" in roles else "questions"
