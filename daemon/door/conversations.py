"""Conversations of clients: bounds that types cannot express, and the struct that actors get."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from hearth.runtime.errors import HearthError
from hearth.runtime.text.conversation import (
    Conversation,
    ResponseFormat,
    Tool,
    ToolCall,
    Turn,
    TurnPart,
)
from hearth_client.protocol import (
    Generate,
    ImagePart,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    Picture,
    Regex,
    TextPart,
    Tokenize,
    VideoPart,
)

MAX_DEPTH = 32
"""Maps and lists in one another, in a schema of a tool or in arguments of a call."""
MAX_VALUES = 32_768
"""Values in all such maps of a request."""
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_SCALARS = (str, bool, int, type(None))


def conversation_of(message: Generate | Tokenize) -> Conversation | None:
    """The conversation of a message that was checked; None where it has a prompt."""
    if message.messages is None:
        return None
    choice = message.tool_choice
    names: dict[str, str] = {}
    return Conversation(
        [_turn(turn, names) for turn in message.messages],
        [Tool(one.name, one.description, one.parameters, one.strict) for one in message.tools],
        f"={choice.name}" if isinstance(choice, NamedTool) else choice,
        message.parallel_tool_calls,
        message.template,
        message.reasoning_budget if isinstance(message, Generate) else None,
    )


def response_format_of(message: Generate) -> ResponseFormat | None:
    """The form that a message asks of its answer."""
    asked = message.response_format
    if asked is None or isinstance(asked, JsonObject):
        return None if asked is None else ResponseFormat("json_object")
    if isinstance(asked, JsonSchema):
        return ResponseFormat("json_schema", schema=asked.schema)
    if isinstance(asked, Regex):
        return ResponseFormat("regex", grammar=asked.regex)
    return ResponseFormat("lark", grammar=asked.grammar)


def check_conversation(message: Generate | Tokenize) -> None:
    """Raise HearthError, with the field at fault, for what a template could make nothing of."""
    values = _Values()
    if message.messages is None:
        _check_alone(message)
    else:
        _check_turns(message.messages, values)
    _check_tools(message, values)
    for name, value in message.template.items():
        if not name.isidentifier():
            raise _wrong(f"template.{name}", "must be a name of letters, digits and _")
        if isinstance(value, float) and not isfinite(value):
            raise _wrong(f"template.{name}", "is not a finite number")
    if isinstance(message, Generate) and isinstance(message.response_format, JsonSchema):
        values.check(message.response_format.schema, "response_format.schema")


class _Values:
    """Checks nested values of one request: those of JSON, `MAX_VALUES` of them at most."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def check(self, value: Any, field: str, depth: int = 0) -> None:
        if isinstance(value, _SCALARS):
            return
        if isinstance(value, float):
            if not isfinite(value):
                raise _wrong(field, "is not a finite number")
            return
        if not isinstance(value, (dict, list)):
            raise _wrong(field, "has a value that JSON has not")
        if depth == MAX_DEPTH:
            raise _wrong(field, f"is nested deeper than {MAX_DEPTH} maps and lists")
        self._left -= len(value)
        if self._left < 0:
            raise _wrong(field, f"and those before it have more than {MAX_VALUES} values")
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise _wrong(field, "has a name that is no text")
            # Inline for most of them.
            if not isinstance(one, _SCALARS):
                at = f"{field}.{key[:64]}" if isinstance(key, str) else f"{field}[{key}]"
                self.check(one, at, depth + 1)


def _check_alone(message: Generate | Tokenize) -> None:
    """Refuse what goes with messages alone."""
    given: dict[str, object] = {
        "tools": message.tools,
        "tool_choice": message.tool_choice != "auto",
        "parallel_tool_calls": not message.parallel_tool_calls,
        "template": message.template,
        "reasoning_budget": isinstance(message, Generate) and message.reasoning_budget is not None,
    }
    for name, value in given.items():
        if value:
            raise HearthError("unsupported_option", f"{name} goes with messages", name)


def _check_tools(message: Generate | Tokenize, values: _Values) -> None:
    names: set[str] = set()
    for index, tool in enumerate(message.tools):
        field = f"tools[{index}]"
        if not _NAME.issuperset(tool.name):
            raise _wrong(f"{field}.name", "has other characters than letters, digits, _ . and -")
        if tool.name in names:
            raise _wrong(f"{field}.name", "is that of another tool too")
        names.add(tool.name)
        values.check(tool.parameters, f"{field}.parameters")
    choice = message.tool_choice
    if isinstance(choice, NamedTool) and choice.name not in names:
        raise _wrong("tool_choice.name", "is that of none of the tools")
    if choice == "required" and not names:
        raise _wrong("tool_choice", "is required, and there are no tools")


def _check_turns(messages: Sequence[Message], values: _Values) -> None:
    """Each result of a tool answers one call of the assistant's last turn."""
    open_calls: dict[str, str] = {}
    for index, turn in enumerate(messages):
        field = f"messages[{index}]"
        _check_content(turn, field)
        if turn.role == "assistant":
            open_calls = _calls_of(turn, field, values)
        else:
            for name in ("reasoning", "tool_calls"):
                if getattr(turn, name):
                    raise _elsewhere(f"{field}.{name}", "the assistant")
        if turn.role == "tool":
            _answer(turn, field, open_calls)
            continue
        for name in ("tool_call_id", "name"):
            if getattr(turn, name) is not None:
                raise _elsewhere(f"{field}.{name}", "a tool")


def _calls_of(turn: Message, field: str, values: _Values) -> dict[str, str]:
    """Names of the tools that a turn calls, by the ids of the calls."""
    calls: dict[str, str] = {}
    for place, call in enumerate(turn.tool_calls):
        at = f"{field}.tool_calls[{place}]"
        if call.id in calls:
            raise _wrong(f"{at}.id", "is that of another call of this turn too")
        calls[call.id] = call.name
        values.check(call.arguments, f"{at}.arguments")
    return calls


def _answer(turn: Message, field: str, open_calls: dict[str, str]) -> None:
    """Take the call that a result answers out of the open ones."""
    if turn.tool_call_id is None:
        raise _wrong(f"{field}.tool_call_id", "is missing: say which call this is the result of")
    name = open_calls.pop(turn.tool_call_id, None)
    if name is None:
        raise _wrong(
            f"{field}.tool_call_id",
            "is of no call of the assistant's last turn that has no result yet",
        )
    if turn.name not in {None, name}:
        raise _wrong(f"{field}.name", "is not that of the tool that was called")


def _check_content(turn: Message, field: str) -> None:
    field = f"{field}.content"
    if turn.content is None:
        if not turn.tool_calls:
            raise HearthError("invalid_value", f"{field} is missing", field)
    elif isinstance(turn.content, str):
        if not (turn.content or turn.role == "tool" or turn.tool_calls):
            raise _empty(field)
    else:
        for place, part in enumerate(turn.content):
            # Inline for most of them: a message may have tens of thousands.
            if not isinstance(part, TextPart) or not part.text:
                _check_part(part, f"{field}[{place}]")


def _check_part(part: TextPart | ImagePart | VideoPart, field: str) -> None:
    if isinstance(part, TextPart):
        raise _empty(f"{field}.text")
    if isinstance(part, ImagePart):
        _check_picture(part, field)
        return
    for index, frame in enumerate(part.frames):
        _check_picture(frame, f"{field}.frames[{index}]")
        if index and frame.time_s < part.frames[index - 1].time_s:
            raise _wrong(f"{field}.frames[{index}].time_s", "is before that of the last frame")


def _check_picture(picture: Picture, field: str) -> None:
    """A file has a format, raw pixels have an encoding and a size, and neither has both."""
    if (picture.format is None) == (picture.encoding is None):
        text = f"{field} must have either format, of a file, or encoding, of raw pixels"
        raise HearthError("invalid_value", text, f"{field}.format")
    for name in ("width", "height", "step"):
        value = getattr(picture, name)
        if picture.format is not None and value is not None:
            text = f"{field}.{name} goes with raw pixels: a file says it itself"
            raise HearthError("unsupported_option", text, f"{field}.{name}")
        if picture.encoding is not None and value is None and name != "step":
            text = f"{field}.{name} is missing: raw pixels do not say it"
            raise HearthError("invalid_value", text, f"{field}.{name}")


def _empty(field: str) -> HearthError:
    return HearthError("prompt_empty", f"{field} is empty: give it text or leave it out", field)


def _elsewhere(field: str, of: str) -> HearthError:
    return HearthError(
        "unsupported_option", f"{field} goes with turns of {of}: leave it out", field
    )


def _wrong(field: str, reason: str) -> HearthError:
    return HearthError("invalid_value", f"{field} {reason}", field)


def _turn(turn: Message, names: dict[str, str]) -> Turn:
    """The turn of a message; `names` of called tools by their calls' ids, which it adds to."""
    calls = [ToolCall(one.id, one.name, one.arguments) for one in turn.tool_calls]
    names.update((one.id, one.name) for one in calls)
    call_id = turn.tool_call_id or ""
    text, parts = _content(turn.content)
    name = names.get(call_id, "")
    return Turn(turn.role, text, parts, turn.reasoning, calls, call_id, name)


def _content(
    content: str | Sequence[TextPart | ImagePart | VideoPart] | None,
) -> tuple[str, list[TurnPart]]:
    """Text, or parts where there is something else among them."""
    if content is None or isinstance(content, str):
        return content or "", []
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "".join(texts), []
    return "", [_part(part) for part in content]


def _part(part: TextPart | ImagePart | VideoPart) -> TurnPart:
    if isinstance(part, TextPart):
        return TurnPart("text", part.text)
    return TurnPart("video" if isinstance(part, VideoPart) else "image")
