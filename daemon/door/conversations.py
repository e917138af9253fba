"""Conversations of clients: bounds that types cannot express, and the struct that actors get."""

from collections.abc import Sequence

from hearth.runtime.errors import HearthError
from hearth.runtime.text.conversation import (
    Conversation,
    JsonValues,
    ResponseFormat,
    Tool,
    ToolCall,
    Turn,
    TurnPart,
    check_conversation,
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


def conversation_of(message: Generate | Tokenize) -> Conversation | None:
    """The conversation of a message that was checked; None where it has a prompt."""
    if message.messages is None:
        return None
    choice = message.tool_choice
    return Conversation(
        [_turn(turn) for turn in message.messages],
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


def check_messages(message: Generate | Tokenize) -> None:
    """Raise HearthError, with the field at fault, for what a template could make nothing of."""
    if message.messages is None:
        _check_alone(message)
    for index, turn in enumerate(message.messages or ()):
        _check_content(turn, f"messages[{index}].content")
    if (conversation := conversation_of(message)) is not None:
        check_conversation(conversation)
    if isinstance(message, Generate) and isinstance(message.response_format, JsonSchema):
        JsonValues().check(message.response_format.schema, "response_format.schema")


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


def _check_content(turn: Message, field: str) -> None:
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


def _wrong(field: str, reason: str) -> HearthError:
    return HearthError("invalid_value", f"{field} {reason}", field)


def _turn(turn: Message) -> Turn:
    calls = [ToolCall(one.id, one.name, one.arguments) for one in turn.tool_calls]
    text, parts = _content(turn.content)
    call_id, name = turn.tool_call_id or "", turn.name or ""
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
