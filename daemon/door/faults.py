"""Why a message could not be decoded: the field at fault and a sentence of our own.

The message is gone through once more, field by field, beside the types that it should have had.
Nothing is taken from the decoder's own words, which change from version to version.
"""

from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from hearth_client.protocol import ClientMessage, Id
from msgspec import Meta, Raw, inspect
from msgspec.msgpack import Decoder

from runtime.errors import HearthError

DECODE_ERRORS = (
    msgspec.ValidationError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)
"""All that decoding hostile bytes raises; the last two are not in msgspec's own family."""

T = TypeVar("T")
_MAX_FIELDS = 64
_MAX_NAME = 64
_NIL = b"\xc0"
_MAP: Decoder[dict[str, Raw]] = Decoder(Annotated[dict[str, Raw], Meta(max_length=_MAX_FIELDS)])
_TEXT = Decoder(str)
_ID: Decoder[str] = Decoder(Id)
_VALUE: Decoder[Any] = Decoder()


def _message_types() -> dict[str, inspect.StructType]:
    union = inspect.type_info(ClientMessage)
    if not isinstance(union, inspect.UnionType):
        raise TypeError("ClientMessage is a union of tagged structs")
    members = [kind for kind in union.types if isinstance(kind, inspect.StructType)]
    return {str(kind.tag): kind for kind in members}


_TYPES = _message_types()
_WITHOUT_ID = {tag for tag, kind in _TYPES.items() if "id" not in {f.name for f in kind.fields}}


def fields_of(data: bytes) -> dict[str, Raw]:
    """The top level of a message, undecoded; empty when even that cannot be read."""
    try:
        return _MAP.decode(data)
    except DECODE_ERRORS:
        return {}


def id_of(fields: dict[str, Raw]) -> str:
    """The request id that an error can be answered to; '' when there is no valid one."""
    try:
        if "t" in fields and _TEXT.decode(fields["t"]) in _WITHOUT_ID:
            return ""
    except DECODE_ERRORS:
        pass
    try:
        return _ID.decode(fields["id"])
    except (KeyError, *DECODE_ERRORS):
        return ""


def explain(fields: dict[str, Raw]) -> HearthError:
    """The error to answer for a message that cannot be decoded, by its top level."""
    if not fields:
        return HearthError(
            "bad_message",
            f"the message is not one msgpack map of 1 to {_MAX_FIELDS} fields with text keys",
        )
    try:
        kind = _kind(fields)
        _check_fields(kind, {name: raw for name, raw in fields.items() if name != "t"}, "", kind)
    except HearthError as error:
        return error
    return HearthError("bad_message", "the message cannot be decoded")


def _kind(fields: dict[str, Raw]) -> inspect.StructType:
    if "t" not in fields:
        raise HearthError("bad_message", "the message has no type: give it the field t", "t")
    try:
        tag = _TEXT.decode(fields["t"])
    except DECODE_ERRORS:
        raise HearthError("bad_message", "t must be the message type as text", "t") from None
    if tag not in _TYPES:
        raise HearthError(
            "unknown_message",
            f"there is no message {_short(tag)!r}: t is one of {', '.join(sorted(_TYPES))}",
            "t",
        )
    return _TYPES[tag]


def _check_fields(
    kind: inspect.StructType, fields: dict[str, Raw], path: str, message: inspect.StructType
) -> None:
    known = {field.name: field for field in kind.fields}
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        at = _join(path, _short(unknown))
        raise HearthError(
            "unsupported_option", f"{at} is not a field of {message.tag}: leave it out", at
        )
    for name, field in known.items():
        at = _join(path, name)
        if name in fields:
            _check(field.type, fields[name], at, message)
        elif field.required:
            raise HearthError("invalid_value", f"{at} is missing", at)


def _check(kind: inspect.Type, raw: Raw, path: str, message: inspect.StructType) -> None:
    """Raise HearthError for the first fault in `raw`; what it should be is `kind`."""
    if isinstance(kind, inspect.UnionType):
        if memoryview(raw) == _NIL:
            return
        kind = _without_none(kind)
    if isinstance(kind, inspect.StructType):
        _check_fields(kind, _decoded(_MAP, raw, kind, path), path, message)
    elif isinstance(kind, inspect.ListType):
        items = _decoded(_list_decoder(kind.min_length, kind.max_length), raw, kind, path)
        for index, item in enumerate(items):
            _check(kind.item_type, item, f"{path}[{index}]", message)
    elif isinstance(kind, inspect.TupleType):
        size = len(kind.item_types)
        items = _decoded(_list_decoder(size, size), raw, kind, path)
        for index, (of, item) in enumerate(zip(kind.item_types, items, strict=True)):
            _check(of, item, f"{path}[{index}]", message)
    elif not _fits(kind, _decoded(_VALUE, raw, kind, path)):
        raise _invalid(kind, path)


@cache
def _list_decoder(least: int | None, most: int | None) -> Decoder[list[Raw]]:
    return Decoder(Annotated[list[Raw], Meta(min_length=least, max_length=most)])


def _decoded(decoder: Decoder[T], raw: Raw, kind: inspect.Type, path: str) -> T:
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError:
        raise HearthError("invalid_value", f"{path} must be valid UTF-8 text", path) from None
    except DECODE_ERRORS:
        raise _invalid(kind, path) from None


def _fits(kind: inspect.Type, value: object) -> bool:
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        wanted = (int,) if isinstance(kind, inspect.IntType) else (int, float)
        return type(value) in wanted and _in_range(kind, value)
    if isinstance(kind, inspect.StrType):
        least, most = kind.min_length or 0, kind.max_length
        return isinstance(value, str) and least <= len(value) <= (most or len(value))
    if isinstance(kind, inspect.LiteralType):
        return isinstance(value, str) and value in kind.values
    return isinstance(value, bool)


def _in_range(kind: inspect.IntType | inspect.FloatType, value: Any) -> bool:
    """Whether a number is in range; one that is not a number never is."""
    low = kind.ge is None or value >= kind.ge
    return low and (kind.gt is None or value > kind.gt) and (kind.le is None or value <= kind.le)


def _invalid(kind: inspect.Type, path: str) -> HearthError:
    return HearthError("invalid_value", f"{path} must be {describe(kind)}", path)


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


def _sized(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.StrType):
        return f"text of {kind.min_length or 0} to {kind.max_length} characters"
    if isinstance(kind, inspect.ListType):
        return f"a list of {kind.min_length or 0} to {kind.max_length} items"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)} items"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a map of its fields"


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    if kind.le is None:
        return noun
    low = f"from {kind.ge}" if kind.gt is None else f"above {kind.gt}"
    return f"{noun} {low} to {kind.le}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
