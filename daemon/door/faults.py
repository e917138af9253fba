"""Decoding faults: the field of a message that could not be decoded, and a sentence of our own.

What could not be decoded is decoded again part by part, each beside its own type, down to the
part that fails. Nothing is taken from the decoder's words, which change from version to version.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Raw, inspect
from msgspec.msgpack import Decoder

from hearth.runtime.errors import HearthError
from hearth_client.protocol import ClientMessage, Id

DECODE_ERRORS = (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoding hostile bytes raises; the last two are not in msgspec's own family."""

EXPLAIN_S = 0.001
_MAX_FIELDS = 64
_MAX_NAME = 64
_SMALL = 4096
"""Bytes of a message, or of a field, that take no time to speak of."""
_MANY = 4096
"""Items of a list that is taken apart: each costs more than to decode it."""
_SHORT_LIST = 0x90
_SHORT_MAP = 0x80
_SHORT_TEXT = 0xA0
_LONG_LISTS = {0xDC: 2, 0xDD: 4}
"""First bytes of a msgpack list, with the bytes of its length that follow."""
_LENGTHS = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4,
    **_LONG_LISTS, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""Bytes of the length behind the first byte: of binary, of text; of extensions, lists and maps."""
_FIXED = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""Bytes behind the first byte of numbers, and of extensions without a length."""
_LONG_MAPS = (0xDE, 0xDF)
_LONG_EXTENSIONS = (0xC7, 0xC8, 0xC9)
_DEEPEST = 64
_MOST_ITEMS = 20_000
_TOO_DEEP = Raw(b"\xc1")
"""Stands for a field that is nested too deep; no message has this byte."""
_RAW_MAP = Annotated[dict[str, Raw], Meta(max_length=_MAX_FIELDS)]
_RAW_LIST = Annotated[list[Raw], Meta(max_length=1 << 16)]
_TYPES: dict[str, type[msgspec.Struct]] = {
    kind.__struct_config__.tag: kind for kind in get_args(ClientMessage)
}


def fields_of(data: bytes | Raw) -> dict[str, Raw]:
    """The top level of a message, undecoded; empty when even that cannot be read.

    Of one with a field that is nested too deep for the decoder, the fields up to that one.
    """
    try:
        found: dict[str, Raw] = _decoder(_RAW_MAP).decode(data)
    except RecursionError:
        return _fields_above(memoryview(data))
    except DECODE_ERRORS:
        return {}
    return found


def id_of(fields: dict[str, Raw]) -> str:
    """The request id that an error can be answered to; '' when there is no valid one."""
    kind = _TYPES.get(_decoded(str, fields.get("t")) or "")
    if kind is not None and "id" not in kind.__struct_fields__:
        return ""
    return _decoded(Id, fields.get("id")) or ""


def explain(fields: dict[str, Raw], clock: Callable[[], float] = time.perf_counter) -> HearthError:
    """The error to answer for a message that cannot be decoded, by its top level.

    Where the fault is not found within `EXPLAIN_S` it is `bad_message`, with the field so far.
    """
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
        _Search(fields, clock).fields(_TYPES[tag], fields, "")
    except HearthError as error:
        return error
    return HearthError("bad_message", "the message cannot be decoded")


class _Search:
    """Goes down to the part at fault, for `EXPLAIN_S` by `clock` where the message is large."""

    def __init__(self, fields: dict[str, Raw], clock: Callable[[], float]) -> None:
        self._clock = clock
        size = sum(len(memoryview(raw)) for raw in fields.values())
        self._until = clock() + EXPLAIN_S if size > _SMALL else math.inf

    def fields(self, kind: type[msgspec.Struct], fields: dict[str, Raw], path: str) -> None:
        """Raise HearthError for a fault among a struct's fields; `path` is before theirs.

        Small ones come first: where all the others are right it is the largest one.
        """
        known = _fields(kind)
        tag = kind.__struct_config__.tag_field
        unknown = next((name for name in fields if name not in known and name != tag), None)
        if unknown is not None:
            at = path + _short(unknown)
            raise HearthError("unsupported_option", f"{at} is no field here: leave it out", at)
        large = []
        for name, field in known.items():
            if name in fields and len(memoryview(fields[name])) > _SMALL:
                large.append(name)
            elif name in fields:
                self.part(field.type, fields[name], path + name)
            elif field.required:
                raise HearthError("invalid_value", f"{path}{name} is missing", path + name)
        large.sort(key=lambda name: len(memoryview(fields[name])))
        for name in large:
            self._go_on(path + name)
            self.part(known[name].type, fields[name], path + name, wrong=name == large[-1])

    def part(self, kind: Any, raw: Raw, path: str, *, wrong: bool = False) -> None:
        """Raise HearthError for the first fault in `raw`, which should be a `kind`.

        A list that must be `wrong` is not decoded once more to see that it is.
        """
        if raw is _TOO_DEEP:
            raise HearthError("bad_message", f"{path} is nested too deep to be read", path)
        not_text = False
        if not (wrong and _is_list(raw)):
            try:
                _decoder(kind).decode(raw)
            except DECODE_ERRORS as error:
                not_text = isinstance(error, UnicodeDecodeError)
            else:
                return
        meant = _meant(kind, raw, path)
        plain = _plain(meant)
        if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
            fields = fields_of(raw)
            if fields:
                self.fields(plain, fields, f"{path}.")
        for index, of, item in self._items(meant, raw, path):
            self.part(of, item, f"{path}[{index}]")
        for name, of, item in _entries(plain, raw):
            self._go_on(path)
            self.part(of, item, f"{path}.{_short(name)}")
        wanted = "valid UTF-8 text" if not_text else describe(inspect.type_info(kind))
        raise HearthError("invalid_value", f"{path} must be {wanted}", path)

    def _items(self, kind: Any, raw: Raw, path: str) -> Iterator[tuple[int, Any, Raw]]:
        """The items of a list or a tuple, with their places and types, as far as there is time.

        None where it cannot be taken apart, or has another number of them than it may have.
        """
        plain = _plain(kind)
        origin, kinds = get_origin(plain), get_args(plain)
        if origin not in {list, tuple} or not _is_list(raw):
            return
        count, most = _length(raw), _most(kind)
        if count > (len(kinds) if origin is tuple else most or count):
            return
        if count > _MANY:
            raise _too_much(path)
        for index, item in enumerate(_decoded(_RAW_LIST, raw) or ()):
            self._go_on(path)
            yield index, kinds[index if origin is tuple else 0], item

    def _go_on(self, path: str) -> None:
        if self._clock() > self._until:
            raise _too_much(path)


def _too_much(path: str) -> HearthError:
    text = f"{path} is not what it has to be: the message is too large to say where"
    return HearthError("bad_message", text, path)


def _fields_above(data: memoryview) -> dict[str, Raw]:
    """Fields of a message in their order, up to the first that is nested deeper than `_DEEPEST`."""
    fields: dict[str, Raw] = {}
    with suppress(IndexError):
        count, at = _count(data, 0)
        for _ in range(min(count // 2, _MAX_FIELDS)):
            behind = _end(data, at)
            name = None if behind is None else _decoded(str, Raw(data[at:behind]))
            if behind is None or name is None:
                break
            end = _end(data, behind)
            fields[name] = _TOO_DEEP if end is None else Raw(data[behind:end])
            if end is None:
                break
            at = end
    return fields


def _end(data: memoryview, at: int) -> int | None:
    """The end of the value at `at`; None where it is nested too deep, or has too many items."""
    left = [1]
    for _ in range(_MOST_ITEMS):
        while left and not left[-1]:
            left.pop()
        if not left:
            return at
        left[-1] -= 1
        count, at = _count(data, at)
        left.append(count)
        if len(left) > _DEEPEST:
            return None
    return None


def _count(data: memoryview, at: int) -> tuple[int, int]:
    """Items of the list or map at `at`, and where they begin; 0, and its end, of another value.

    A map has two items an entry. Raises IndexError behind the end of the data.
    """
    first, at = data[at], at + 1
    if size := _LENGTHS.get(first, 0):
        number, at = int.from_bytes(data[at : at + size], "big"), at + size
    elif first & 0xE0 == _SHORT_TEXT:
        number = first & 0x1F
    else:
        number = first & 0x0F
    if first in _LONG_LISTS or first & 0xF0 == _SHORT_LIST:
        return number, at
    if first in _LONG_MAPS or first & 0xF0 == _SHORT_MAP:
        return 2 * number, at
    if size or first & 0xE0 == _SHORT_TEXT:
        return 0, at + number + (first in _LONG_EXTENSIONS)
    return 0, at + _FIXED.get(first, 0)


def _entries(kind: Any, raw: Raw) -> Iterator[tuple[str, Any, Raw]]:
    """The entries of a map of any names, and the type of each."""
    if get_origin(kind) is dict:
        for name, item in fields_of(raw).items():
            yield name, get_args(kind)[1], item


def _is_list(raw: Raw) -> bool:
    first = memoryview(raw)[0]
    return first & 0xF0 == _SHORT_LIST or first in _LONG_LISTS


def _length(raw: Raw) -> int:
    """Number of items that a list's header gives."""
    data = memoryview(raw)
    if data[0] & 0xF0 == _SHORT_LIST:
        return data[0] & 0x0F
    return int.from_bytes(data[1 : 1 + _LONG_LISTS[data[0]]], "big")


def _meant(kind: Any, raw: Raw, path: str) -> Any:
    """Pick the type of a union that `raw` was meant to be: by its tag, or for being a list or map.

    Raises HearthError for a tag that none of them has.
    """
    kinds: list[Any] = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) not in {Union, UnionType}:
        return kind
    if len(kinds) == 1:
        return kinds[0]
    tagged: dict[str, Any] = {}
    for one in kinds:
        if hasattr(one, "__struct_config__"):
            tagged[str(one.__struct_config__.tag)] = one
    fields = fields_of(raw)
    if fields and len(tagged) > 1:
        tag = _decoded(str, fields.get("type"))
        if tag not in tagged:
            text = f"{path}.type must be one of {', '.join(sorted(tagged))}"
            raise HearthError("invalid_value", text, f"{path}.type")
        return tagged[tag]
    if fields:
        maps = [one for one in kinds if get_origin(_plain(one)) is dict]
        return next(iter([*tagged.values(), *maps]), kind)
    is_list = _is_list(raw)
    return next((one for one in kinds if is_list and get_origin(_plain(one)) is list), kind)


def _plain(kind: Any) -> Any:
    """A type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _decoded(kind: Any, raw: bytes | Raw | None) -> Any:
    """Value of `raw`; None where it is missing or no `kind`."""
    try:
        return None if raw is None else _decoder(kind).decode(raw)
    except DECODE_ERRORS:
        return None


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(kind)}


@cache
def _most(kind: Any) -> int | None:
    """Most items of a list of this type; None for any number."""
    found = inspect.type_info(kind)
    return found.max_length if isinstance(found, inspect.ListType) else None


@cache
def _decoder(kind: Any) -> Decoder[Any]:
    return Decoder(kind)


_COUNTED: dict[type[inspect.Type], tuple[str, str]] = {
    inspect.StrType: ("text", "characters"),
    inspect.ListType: ("a list", "items"),
    inspect.DictType: ("a map", "entries"),
}
_PLAIN_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.AnyType: "a value that JSON has",
}


def describe(kind: inspect.Type) -> str:
    """Describe a value of this type in words."""
    if isinstance(kind, inspect.UnionType):
        kinds = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
        return " or ".join(dict.fromkeys(map(describe, kinds)))
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return _number(kind)
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, (inspect.StrType, inspect.ListType, inspect.DictType)):
        what, of = _COUNTED[type(kind)]
        most = kind.max_length
        return what if most is None else f"{what} of {kind.min_length or 0} to {most} {of}"
    items = f"a list of {len(kind.item_types)} items" if isinstance(kind, inspect.TupleType) else ""
    return items or _PLAIN_WORDS.get(type(kind), "a map of its fields")


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    if kind.le is None:
        return noun
    low = f"from {kind.ge}" if kind.gt is None else f"above {kind.gt}"
    return f"{noun} {low} to {kind.le}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
