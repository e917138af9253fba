"""Messages, tools and forms of OpenAI's API, in Hearth's words."""

import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hearth_client import Image, Message, Tool, ToolCall
from hearth_client.errors import ImageInvalid
from hearth_http.errors import BAD_REQUEST, ApiError, invalid, unsupported
from hearth_http.fields import Fields

NAMES: Sequence[tuple[str, str]] = (
    (r"^(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)", r"\1.function.\2"),
    (r"^(messages\[\d+\])\.reasoning$", r"\1.reasoning_content"),
    (r"^(tools\[\d+\])\.", r"\1.function."),
    (r"^tool_choice\.name", "tool_choice.function.name"),
    (r"^response_format\.schema", "response_format.json_schema.schema"),
    (r"^template", "chat_template_kwargs"),
    (r"^adapter$", "model"),
    (r"^prompt$", "messages"),
)
"""Patterns of Hearth's fields, and what they are called here."""
_DATA = re.compile(r"data:image/[a-z0-9.+-]+;base64", re.IGNORECASE)
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])
Turn = Message | Mapping[str, Any]


def turns(fields: Fields) -> list[Turn]:
    """The conversation in `messages`, turn by turn."""
    items = fields.items("messages")
    if not items:
        raise invalid(fields.at("messages"), "is missing: it must be a list of messages")
    return [_turn(Fields(value, path)) for path, value in items]


def _turn(turn: Fields) -> Turn:
    content = turn.take("content")
    if isinstance(content, list):
        content = [
            _part(Fields(one, f"{turn.at('content')}[{i}]")) for i, one in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise invalid(turn.at("content"), "must be text or a list of parts")
    calls = [_call(Fields(value, path)) for path, value in turn.items("tool_calls")]
    # What an answer of this API has, and means nothing in a turn.
    turn.only("annotations", [])
    turn.only("refusal")
    fields: dict[str, Any] = {
        "role": turn.needed("role"),
        "content": None if calls and content == "" else content,
        "reasoning": turn.text("reasoning_content") or turn.text("reasoning") or "",
        "tool_calls": calls,
        "tool_call_id": turn.text("tool_call_id"),
        "name": turn.text("name"),
    }
    turn.end()
    # The client makes parts of text and pictures, and needs no help with the rest.
    return fields if isinstance(content, list) else Message(**fields)


def _part(piece: Fields) -> str | Image:
    kind = piece.needed("type")
    if kind == "text":
        found: str | Image = piece.needed("text")
    elif kind == "image_url":
        picture = piece.take("image_url")
        inner = Fields({"url": picture} if isinstance(picture, str) else picture, piece.at(kind))
        # The daemon shows a picture as large as the model takes it.
        inner.only("detail", "auto", "high")
        head, _, data = inner.needed("url").partition(",")
        if not _DATA.fullmatch(head):
            raise invalid(inner.at("url"), "must be data:image/...;base64,...; none is fetched")
        found = image_of(data, inner.at("url"))
        inner.end()
    else:
        raise unsupported(piece.at("type"), "may be text or image_url alone")
    piece.end()
    return found


def image_of(data: Any, path: str) -> Image:
    """The picture of a file in Base64."""
    try:
        return Image(b64decode(data, validate=True))
    except (TypeError, ValueError):
        raise invalid(path, "must be Base64") from None
    except ImageInvalid as error:
        raise ApiError(BAD_REQUEST, error.code, error.message, path) from None


def _call(call: Fields) -> ToolCall:
    call.only("type", "function")
    call.some("index")
    inner = call.part("function")
    try:
        arguments = _ARGUMENTS.decode(inner.text("arguments") or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise invalid(inner.at("arguments"), "must be a JSON object as text") from None
    found = ToolCall(id=call.needed("id"), name=inner.needed("name"), arguments=arguments)
    inner.end()
    call.end()
    return found


def tools(fields: Fields) -> dict[str, Any]:
    """The options `tools`, `tool_choice` and `parallel_tool_calls`, as far as they are given."""
    found = fields.some("parallel_tool_calls")
    listed = [_tool(Fields(value, path)) for path, value in fields.items("tools")]
    if listed:
        found["tools"] = listed
    choice = fields.take("tool_choice")
    if isinstance(choice, dict):
        chosen = Fields(choice, fields.at("tool_choice"))
        chosen.only("type", "function")
        inner = chosen.part("function")
        choice = {"name": inner.needed("name")}
        inner.end()
        chosen.end()
    if choice is not None:
        found["tool_choice"] = choice
    return found


def _tool(tool: Fields) -> Tool:
    if tool.needed("type") != "function":
        raise unsupported(tool.at("type"), "may be function alone")
    inner = tool.part("function")
    found = Tool(
        name=inner.needed("name"),
        description=inner.text("description") or "",
        parameters=inner.take("parameters") or {},
        strict=inner.flag("strict"),
    )
    inner.end()
    tool.end()
    return found


def response_format(fields: Fields) -> dict[str, Any]:
    """The option `response_format`, where the answer is not just text."""
    form = fields.inner("response_format")
    if form is None:
        return {}
    kind = form.needed("type")
    if kind == "json_schema":
        inner = form.part(kind)
        # For people; and all forms are strict here.
        inner.some("name", "description", "strict")
        found = {"type": kind, **inner.some("schema")}
        inner.end()
    else:
        # Those that the API has, and Hearth's regex and lark.
        found = {"type": kind, **form.some("regex", "grammar")}
    form.end()
    return {} if kind == "text" else {"response_format": found}
