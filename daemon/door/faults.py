"""Why a message could not be decoded: the field at fault and a sentence of our own.

The path comes from msgspec's error (its only part that is used), the sentence from the type that
the field should have had.
"""

import re
from typing import Annotated

import msgspec
from hearth_client.protocol import ClientMessage, Id
from msgspec import Meta, Raw, inspect

from runtime.errors import HearthError

DECODE_ERRORS = (
    msgspec.ValidationError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)
"""All that decoding hostile bytes raises; the last two are not in msgspec's own family."""

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_MAX_FIELDS = 64
_MAX_NAME = 64
_MAX_ITEMS = 1024
_FIELD_DECODER: msgspec.msgpack.Decoder[dict[str, Raw]] = msgspec.msgpack.Decoder(
    Annotated[dict[str, Raw], Meta(max_length=_MAX_FIELDS)]
)
_ITEM_DECODER: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(
    Annotated[list[Raw], Meta(max_length=_MAX_ITEMS)]
)
_TEXT_DECODER = msgspec.msgpack.Decoder(str)
_ID_DECODER: msgspec.msgpack.Decoder[str] = msgspec.msgpack.Decoder(Id)


def _message_types() -> dict[str, inspect.StructType]:
    union = inspect.type_info(ClientMessage)
    if not isinstance(union, inspect.UnionType):
        raise TypeError("ClientMessage is a union of tagged structs")
    members = [kind for kind in union.types if isinstance(kind, inspect.StructType)]
    return {str(kind.tag): kind for kind in members}


_TYPES = _message_types()


def fields_of(data: bytes) -> dict[str, Raw]:
    """The top level of a message, undecoded; empty when even that cannot be read."""
    try:
        return _FIELD_DECODER.decode(data)
    except DECODE_ERRORS:
        return {}


def id_of(fields: dict[str, Raw]) -> str:
    """The request id that an error can be answered to; '' when there is no valid one."""
    try:
        return _ID_DECODER.decode(fields["id"])
    except (KeyError, *DECODE_ERRORS):
        return ""


def explain(error: Exception, fields: dict[str, Raw]) -> HearthError:
    """The error to answer for bytes whose decoding raised `error`."""
    if not fields:
        return _unreadable(error)
    kind = _kind(fields)
    if isinstance(kind, HearthError):
        return kind
    if isinstance(error, UnicodeDecodeError):
        return _not_text(fields)
    return _invalid(str(error), kind)


def _unreadable(error: Exception) -> HearthError:
    at = _PATH.search(str(error))
    if at:
        # Nested so deep that not even the top level can be taken apart.
        return HearthError("invalid_value", f"{at.group(1)} cannot be read", at.group(1))
    return HearthError(
        "bad_message",
        f"the message is not one msgpack map of 1 to {_MAX_FIELDS} fields with text keys",
    )


def _kind(fields: dict[str, Raw]) -> inspect.StructType | HearthError:
    if "t" not in fields:
        return HearthError("bad_message", "the message has no type: give it the field t", "t")
    try:
        tag = _TEXT_DECODER.decode(fields["t"])
    except DECODE_ERRORS:
        return HearthError("bad_message", "t must be the message type as text", "t")
    if tag not in _TYPES:
        return HearthError(
            "unknown_message",
            f"there is no message {_short(tag)!r}: t is one of {', '.join(sorted(_TYPES))}",
            "t",
        )
    return _TYPES[tag]


def _invalid(text: str, kind: inspect.StructType) -> HearthError:
    at = _PATH.search(text)
    path = at.group(1) if at else ""
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    if unknown:
        name = _join(path, _short(unknown.group(1)))
        return HearthError(
            "unsupported_option", f"{name} is not a field of {kind.tag}: leave it out", name
        )
    if missing:
        name = _join(path, missing.group(1))
        return HearthError("invalid_value", f"{name} is missing", name)
    wanted = _at(kind, path)
    if not path or wanted is None:
        return HearthError("bad_message", "the message cannot be decoded")
    return HearthError("invalid_value", f"{path} must be {describe(wanted)}", path)


def _not_text(fields: dict[str, Raw]) -> HearthError:
    for name, raw in fields.items():
        path = _find_bad_text(raw, name)
        if path is not None:
            return HearthError("invalid_value", f"{path} must be valid UTF-8 text", path)
    return HearthError("bad_message", "the message holds text that is not valid UTF-8")


def _find_bad_text(raw: Raw, path: str, depth: int = 3) -> str | None:
    """The path of the first text in `raw` that is not UTF-8, no deeper than our types go."""
    try:
        _TEXT_DECODER.decode(raw)
    except UnicodeDecodeError:
        return path
    except DECODE_ERRORS:
        parts = _parts(raw) if depth else {}
        found = (_find_bad_text(part, path + step, depth - 1) for step, part in parts.items())
        return next((at for at in found if at is not None), None)
    return None


def _parts(raw: Raw) -> dict[str, Raw]:
    try:
        return {f"[{index}]": part for index, part in enumerate(_ITEM_DECODER.decode(raw))}
    except DECODE_ERRORS:
        return {f".{name}": part for name, part in fields_of(bytes(raw)).items()}


def _at(kind: inspect.Type, path: str) -> inspect.Type | None:
    """The type at a path such as `messages[0].role`."""
    node: inspect.Type | None = kind
    for index, name in _STEP.findall(path):
        node = _inside(node, name, int(index) if index else 0)
    return node


def _inside(node: inspect.Type | None, name: str, index: int) -> inspect.Type | None:
    if isinstance(node, inspect.UnionType):
        node = _without_none(node)
    if isinstance(node, inspect.StructType):
        return next((field.type for field in node.fields if field.name == name), None)
    if isinstance(node, inspect.ListType):
        return node.item_type
    if isinstance(node, inspect.TupleType) and index < len(node.item_types):
        return node.item_types[index]
    return None


def _without_none(union: inspect.UnionType) -> inspect.Type:
    return next(kind for kind in union.types if not isinstance(kind, inspect.NoneType))


def describe(kind: inspect.Type) -> str:
    """What a value of this type is, in words."""
    if isinstance(kind, inspect.UnionType):
        return describe(_without_none(kind))
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return _number(kind)
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    return _sized(kind)


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    low = f"from {kind.ge}" if kind.gt is None else f"above {kind.gt}"
    return f"{noun} {low} to {kind.le}"


def _sized(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.StrType):
        return f"text of {kind.min_length or 0} to {kind.max_length} characters"
    if isinstance(kind, inspect.ListType):
        return f"a list of {kind.min_length or 0} to {kind.max_length} items"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)} items"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a map of its fields"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
