"""Why a message could not be decoded: the field at fault and a sentence of our own.

What could not be decoded is decoded again part by part, each beside its own type, down to the
part that fails. Nothing is taken from the decoder's words, which change from version to version.
"""

from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from hearth_client.protocol import ClientMessage, Id
from msgspec import Meta, Raw, inspect
from msgspec.msgpack import Decoder

from runtime.errors import HearthError

DECODE_ERRORS = (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoding hostile bytes raises; the last two are not in msgspec's own family."""

_MAX_FIELDS = 64
_MAX_NAME = 64
_RAW_MAP = Annotated[dict[str, Raw], Meta(max_length=_MAX_FIELDS)]
_RAW_LIST = Annotated[list[Raw], Meta(max_length=1 << 16)]
_TYPES: dict[str, type[msgspec.Struct]] = {
    kind.__struct_config__.tag: kind for kind in get_args(ClientMessage)
}


def fields_of(data: bytes | Raw) -> dict[str, Raw]:
    """The top level of a message, undecoded; empty when even that cannot be read."""
    return _decoded(_RAW_MAP, data) or {}


def id_of(fields: dict[str, Raw]) -> str:
    """The request id that an error can be answered to; '' when there is no valid one."""
    kind = _TYPES.get(_decoded(str, fields.get("t")) or "")
    if kind is not None and "id" not in kind.__struct_fields__:
        return ""
    return _decoded(Id, fields.get("id")) or ""


def explain(fields: dict[str, Raw]) -> HearthError:
    """The error to answer for a message that cannot be decoded, by its top level."""
    if not fields:
        return HearthError(
            "bad_message",
            f"the message is not one msgpack map of 1 to {_MAX_FIELDS} fields with text keys",
        )
    if "t" not in fields:
        return HearthError("bad_message", "the message has no type: give it the field t", "t")
    tag = _decoded(str, fields["t"])
    if tag is None:
        return HearthError("bad_message", "t must be the message type as text", "t")
    if tag not in _TYPES:
        names = ", ".join(sorted(_TYPES))
        return HearthError(
            "unknown_message", f"there is no message {_short(tag)!r}: t is one of {names}", "t"
        )
    try:
        _check_fields(_TYPES[tag], fields, "")
    except HearthError as error:
        return error
    return HearthError("bad_message", "the message cannot be decoded")


def _check_fields(kind: type[msgspec.Struct], fields: dict[str, Raw], path: str) -> None:
    """Raise HearthError for the first fault among a struct's fields; `path` is before theirs."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    tag = kind.__struct_config__.tag_field
    unknown = next((name for name in fields if name not in known and name != tag), None)
    if unknown is not None:
        at = path + _short(unknown)
        raise HearthError("unsupported_option", f"{at} is no field here: leave it out", at)
    for name, field in known.items():
        if name in fields:
            _check(field.type, fields[name], path + name)
        elif field.required:
            raise HearthError("invalid_value", f"{path}{name} is missing", path + name)


def _check(kind: Any, raw: Raw, path: str) -> None:
    """Raise HearthError for the first fault in `raw`, which should be a `kind`."""
    try:
        _decoder(kind).decode(raw)
    except DECODE_ERRORS as error:
        plain = _plain(_meant(kind, raw, path))
        if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
            fields = fields_of(raw)
            if fields:
                _check_fields(plain, fields, f"{path}.")
        for index, of, item in _wrong_items(plain, raw):
            _check(of, item, f"{path}[{index}]")
        not_text = isinstance(error, UnicodeDecodeError)
        wanted = "valid UTF-8 text" if not_text else describe(inspect.type_info(kind))
        raise HearthError("invalid_value", f"{path} must be {wanted}", path) from None


def _wrong_items(kind: Any, raw: Raw) -> Iterable[tuple[int, Any, Raw]]:
    """The items of a tuple, or the first of a list that is none, with their places and types.

    None where it cannot be taken apart. A list is halved until one item is left, so that all of
    them are looked at twice, and together.
    """
    items = (_decoded(_RAW_LIST, raw) if get_origin(kind) in {list, tuple} else None) or []
    kinds = get_args(kind)
    if get_origin(kind) is tuple:
        places = range(len(items)) if len(kinds) == len(items) else ()
        return [(place, kinds[place], items[place]) for place in places]
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        half = msgspec.msgpack.encode(items[low:middle])
        low, high = (low, middle) if _decoded(kind, half) is None else (middle, high)
    return [(low, kinds[0], items[low])] if items else ()


def _meant(kind: Any, raw: Raw, path: str) -> Any:
    """Of several types the one that `raw` was meant to be: by its tag, or for being a list.

    Raises HearthError for a tag that none of them has.
    """
    kinds: list[Any] = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) not in {Union, UnionType}:
        return kind
    if len(kinds) == 1:
        return kinds[0]
    tagged = {
        str(one.__struct_config__.tag): one for one in kinds if hasattr(one, "__struct_config__")
    }
    fields = fields_of(raw) if tagged else {}
    if fields:
        tag = _decoded(str, fields.get("type"))
        if tag not in tagged:
            text = f"{path}.type must be one of {', '.join(sorted(tagged))}"
            raise HearthError("invalid_value", text, f"{path}.type")
        return tagged[tag]
    is_list = _decoded(_RAW_LIST, raw) is not None
    return next((one for one in kinds if is_list and get_origin(_plain(one)) is list), kind)


def _plain(kind: Any) -> Any:
    """A type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _decoded(kind: Any, raw: bytes | Raw | None) -> Any:
    """What `raw` says, None where it is missing or no `kind`."""
    try:
        return None if raw is None else _decoder(kind).decode(raw)
    except DECODE_ERRORS:
        return None


@cache
def _decoder(kind: Any) -> Decoder[Any]:
    return Decoder(kind)


def describe(kind: inspect.Type) -> str:
    """What a value of this type is, in words."""
    if isinstance(kind, inspect.UnionType):
        kinds = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
        return " or ".join(dict.fromkeys(map(describe, kinds)))
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return _number(kind)
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, (inspect.StrType, inspect.ListType)):
        is_text = isinstance(kind, inspect.StrType)
        what, of = ("text", "characters") if is_text else ("a list", "items")
        return f"{what} of {kind.min_length or 0} to {kind.max_length} {of}"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)} items"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a map of its fields"


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    if kind.le is None:
        return noun
    low = f"from {kind.ge}" if kind.gt is None else f"above {kind.gt}"
    return f"{noun} {low} to {kind.le}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
