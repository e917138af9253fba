"""Bytes of a client to a checked message, and checked messages to what actors are asked."""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from hearth.actors.messages import Convert, Request
from hearth.daemon.door.conversations import (
    check_messages,
    conversation_of,
    response_format_of,
)
from hearth.daemon.door.faults import DECODE_ERRORS, explain, fields_of, id_of
from hearth.daemon.door.sessions import Session
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions, check_options, seeded
from hearth_client.protocol import (
    PROTOCOL,
    ClientMessage,
    Detokenize,
    Generate,
    Hello,
    Message,
    Tokenize,
)

_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
READ_FEATURES = frozenset({"reasoning", "tool_calls", "token_bytes"})
"""Features of a client by which the tokenizer reads its replies."""
_LARGE = 1 << 16
"""Bytes of a message that may hold so many values that the collector takes longer than they do."""
_OPTIONS = [name for name in RequestOptions.__struct_fields__ if name in Generate.__struct_fields__]
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
        with _uncollected(data):
            message = _decoder.decode(data)
    except DECODE_ERRORS:
        fields = fields_of(data)
        raise MessageError(explain(fields), id_of(fields)) from None
    try:
        _check(message)
    except HearthError as error:
        raise MessageError(error, getattr(message, "id", "")) from None
    return message


@contextmanager
def _uncollected(data: bytes) -> Iterator[None]:
    """Keep the collector from looking through what a large message becomes, again and again."""
    large = len(data) > _LARGE and gc.isenabled()
    if large:
        gc.disable()
    try:
        yield
    finally:
        if large:
            gc.enable()


def prepare(
    message: Generate,
    rids: Sequence[int],
    deadline: float | None,
    session: Session,
    own: Mapping[str, float],
) -> Request:
    """Build the tokenizer's message of a generation with replies of these numbers.

    `own` are the model's own options.
    """
    features = session.features
    return Request(
        rids[0],
        seeded(_options(message, own if "generation_defaults" in features else {})),
        message.priority,
        deadline,
        session.number,
        chat=conversation_of(message),
        prompt=message.prompt,
        response_format=response_format_of(message),
        features=sorted(features & READ_FEATURES),
        siblings=[*rids[1:]],
    )


def convert(message: Tokenize | Detokenize, rid: int, client: int) -> Convert:
    """Build the tokenizer's message outside any generation."""
    if isinstance(message, Detokenize):
        return Convert(rid, tokens=message.tokens, client=client)
    return Convert(rid, text=message.text, chat=conversation_of(message), client=client)


def _options(message: Generate, defaults: Mapping[str, float]) -> RequestOptions:
    """Copy options by name: those of the protocol are spelt as those of the runtime.

    One that is not given has its value in `defaults`, or that of `RequestOptions`.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(message, name)) is not None}
    return msgspec.convert({**defaults, **given}, RequestOptions)


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
        check_options(_options(message, {}))
        check_messages(message)
    elif isinstance(message, Tokenize):
        _check_source(message.messages, message.text, "text")
        check_messages(message)


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
    if messages is not None and text is not None:
        raise HearthError("invalid_value", f"give either messages or {name}, not both", name)
