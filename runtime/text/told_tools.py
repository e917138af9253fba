"""Tools, calls and results in words, for chat templates that leave them out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hearth.runtime.text.reply_format import CallForm, spelled_calls
from hearth.runtime.text.reply_probe import ReplyProbe

_INTRODUCTION = (
    "You may call tools. To call one, write its call in this form and nothing after it; to call "
    "several, write one call after another:\n\n{example}\n\nThe tools, with the JSON schemas of "
    "their arguments, are:\n\n{tools}\n\nThe results come in the next message."
)
_EXAMPLE = ("name_of_the_tool", {"argument": "value"})
Dump = Callable[[Any], str]
"""JSON text of a value."""


def tell(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    shown: ReplyProbe,
    dump: Dump,
    *,
    own: bool,
) -> list[dict[str, Any]]:
    """Messages, as templates take them, with what the template leaves out in their text.

    With `own` the form is Hearth's, and tools are told though the template shows them. They stand
    in the system turn, or in the first one where the model has no such turn, calls in the turns of
    the assistant, results in turns of the user.
    """
    found = [dict(one) for one in messages]
    for message in found:
        if message.get("tool_calls") and not shown.shows_calls:
            functions = [one["function"] for one in message.pop("tool_calls")]
            calls = [(one["name"], one["arguments"]) for one in functions]
            _add(message, spelled_calls(form, calls, dump))
    if not shown.shows_results:
        found = _results_as_text(found, dump)
    if tools and (own or not shown.shows_tools):
        lines = "\n".join(dump(one["function"]) for one in tools)
        text = _INTRODUCTION.format(example=spelled_calls(form, [_EXAMPLE], dump), tools=lines)
        if found and (found[0]["role"] in {"system", "developer"} or not shown.shows_system):
            _add(found[0], text)
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def _results_as_text(messages: Sequence[dict[str, Any]], dump: Dump) -> list[dict[str, Any]]:
    """Messages in which results that follow each other are one turn of the user."""
    found: list[dict[str, Any]] = []
    told = False
    for message in messages:
        if message["role"] != "tool":
            found.append(message)
            told = False
            continue
        if not isinstance(message["content"], str):
            found.append({"role": "user", "content": message["content"]})
            told = False
            continue
        line = dump({"tool": message["name"], "result": message["content"]})
        if told:
            _add(found[-1], line)
        else:
            found.append({"role": "user", "content": line})
        told = True
    return found


def _add(message: dict[str, Any], text: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}\n\n{text}" if content else text
    else:
        message["content"] = [*content, {"type": "text", "text": text}]
