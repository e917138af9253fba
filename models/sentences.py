"""Sentences of a file, and whether answers to them are right.

A line is a JSON object: `user`, `expect`, and where wanted `devices` (lines of the list, or objects
of name, kind, room and state), `tools` (definitions), `before` (earlier messages), `system`.

`expect` is an action or a list of actions, in any order; `{"tool": name, "arguments": {...}}` or a
list of those; "refuse"; "ask"; or words that the answer has, one text or a list of which it has
all. Case, articles and punctuation at the end do not count, and "two" is 2 in words.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from models.conversations import HEADS, Message, system_prompt
from models.domain import Device

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_REFUSES: Final = re.compile(
    r"\b(cannot|can't|can not|no|not|nothing|don't|doesn't|unable|only know|sorry|isn't|aren't)\b",
    re.IGNORECASE,
)

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
    return Sentence(messages, tools, fields["expect"])


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


def is_right(answer: str, expect: Any) -> bool:
    """Return whether an answer is what was expected."""
    answer = answer.strip()
    wanted = expect if isinstance(expect, list) else [expect]
    calls, actions = calls_of(answer), actions_of(answer)
    if all(isinstance(one, dict) and "tool" in one for one in wanted):
        named = [{"name": one["tool"], "arguments": one.get("arguments", {})} for one in wanted]
        return _same(calls, named)
    if all(isinstance(one, dict) for one in wanted):
        return not calls and _same(actions, wanted)
    if calls or any(isinstance(one, dict) for one in actions):
        return False
    if expect == "ask":
        return answer.endswith("?")
    if expect == "refuse":
        return bool(_REFUSES.search(answer)) and not answer.endswith("?")
    return all(_has(answer, str(word)) for word in wanted)


def kind_of_expected(expect: Any) -> str:
    """Return the group under which a sentence is counted."""
    one = expect[0] if isinstance(expect, list) and expect else expect
    if isinstance(one, dict):
        return "tools" if "tool" in one else "actions"
    return expect if expect in ("ask", "refuse") else "words"
