"""Bytes of a client to a checked message, and checked messages to what actors are asked."""

import re
from collections.abc import Sequence

import msgspec

from hearth.actors.messages import ChatTurn, Convert, Request, TurnPart
from hearth.daemon.door.faults import DECODE_ERRORS, explain, fields_of, id_of
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions, check_options, seeded
from hearth_client.protocol import (
    PROTOCOL,
    ClientMessage,
    Detokenize,
    Generate,
    Hello,
    ImagePart,
    Message,
    Picture,
    TextPart,
    Tokenize,
    VideoPart,
)

_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(
    "(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    "(?P<more>-.*)?"
)


class MessageError(Exception):
    """A message that is answered with `error`; `id` is the request it meant, or ''."""

    def __init__(self, error: HearthError, request_id: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.id = request_id


def decode(data: bytes) -> ClientMessage:
    """Decode and check one message; raises MessageError and nothing else, for any bytes."""
    try:
        message = _decoder.decode(data)
    except DECODE_ERRORS:
        fields = fields_of(data)
        raise MessageError(explain(fields), id_of(fields)) from None
    try:
        _check(message)
    except HearthError as error:
        raise MessageError(error, getattr(message, "id", "")) from None
    return message


def prepare(message: Generate, rid: int, deadline: float | None, client: int) -> Request:
    """Build the tokenizer's message of a generation."""
    return Request(
        rid,
        seeded(_options(message)),
        message.priority,
        deadline,
        client,
        turns=_turns(message.messages),
        prompt=message.prompt,
    )


def convert(message: Tokenize | Detokenize, rid: int, client: int) -> Convert:
    """Build the tokenizer's message outside any generation."""
    if isinstance(message, Detokenize):
        return Convert(rid, tokens=message.tokens, client=client)
    return Convert(rid, text=message.text, turns=_turns(message.messages), client=client)


def visuals_of(messages: Sequence[Message] | None) -> list[tuple[str, ImagePart | VideoPart]]:
    """Images and videos in their order, each with its field."""
    return [
        (f"messages[{index}].content[{place}]", part)
        for index, turn in enumerate(messages or ())
        if not isinstance(turn.content, str)
        for place, part in enumerate(turn.content)
        if not isinstance(part, TextPart)
    ]


def _options(message: Generate) -> RequestOptions:
    """Copy options by name: those of the protocol are spelt as those of the runtime."""
    return msgspec.convert(message, RequestOptions, from_attributes=True)


def _turns(messages: list[Message] | None) -> list[ChatTurn] | None:
    if messages is None:
        return None
    return [_turn(turn) for turn in messages]


def _turn(turn: Message) -> ChatTurn:
    if isinstance(turn.content, str):
        return ChatTurn(turn.role, turn.content)
    texts = [part.text for part in turn.content if isinstance(part, TextPart)]
    if len(texts) == len(turn.content):
        return ChatTurn(turn.role, "".join(texts))
    return ChatTurn(turn.role, "", [_part(part) for part in turn.content])


def _part(part: TextPart | ImagePart | VideoPart) -> TurnPart:
    if isinstance(part, TextPart):
        return TurnPart("text", part.text)
    return TurnPart("video" if isinstance(part, VideoPart) else "image")


def _check(message: ClientMessage) -> None:
    """Check the bounds that types cannot express."""
    if isinstance(message, Hello):
        _check_protocol(message)
    elif isinstance(message, Generate):
        _check_source(message.messages, message.prompt, "prompt")
        if message.prompt == "":
            raise HearthError(
                "prompt_empty", "prompt is empty: there is nothing to continue", "prompt"
            )
        _check_traceparent(message.traceparent)
        check_options(_options(message))
    elif isinstance(message, Tokenize):
        _check_source(message.messages, message.text, "text")


def _check_protocol(message: Hello) -> None:
    if PROTOCOL not in message.proto:
        raise HearthError(
            "unsupported_protocol", f"this server speaks protocol {PROTOCOL} alone", "proto"
        )


def _check_traceparent(text: str | None) -> None:
    """Version 00 has these four fields alone, a later one may have more behind them."""
    match = None if text is None else _TRACEPARENT.fullmatch(text)
    if text is not None and (match is None or (match["version"] == "00" and match["more"])):
        raise HearthError(
            "invalid_value",
            "traceparent is not of the form that W3C Trace Context gives it: "
            "00-<32 hex digits>-<16 hex digits>-<2 hex digits>, in lower case and not all zero",
            "traceparent",
        )


def _check_source(messages: list[Message] | None, text: str | None, name: str) -> None:
    if messages is None and text is None:
        raise HearthError("invalid_value", f"neither messages nor {name} is given", "messages")
    if messages is None:
        return
    if text is not None:
        raise HearthError("invalid_value", f"give either messages or {name}, not both", name)
    for index, turn in enumerate(messages):
        field = f"messages[{index}].content"
        if isinstance(turn.content, str):
            _check_text(turn.content, field)
            continue
        for place, part in enumerate(turn.content):
            # Inline for most of them: a message may have tens of thousands.
            if not isinstance(part, TextPart) or not part.text:
                _check_part(part, f"{field}[{place}]")


def _check_text(text: str, field: str) -> None:
    if not text:
        raise HearthError("prompt_empty", f"{field} is empty: give it text or leave it out", field)


def _check_part(part: TextPart | ImagePart | VideoPart, field: str) -> None:
    if isinstance(part, TextPart):
        _check_text(part.text, f"{field}.text")
    elif isinstance(part, ImagePart):
        _check_picture(part, field)
    else:
        for index, frame in enumerate(part.frames):
            _check_picture(frame, f"{field}.frames[{index}]")
            if index and frame.time_s < part.frames[index - 1].time_s:
                at = f"{field}.frames[{index}].time_s"
                raise HearthError("invalid_value", f"{at} is before that of the last frame", at)


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
