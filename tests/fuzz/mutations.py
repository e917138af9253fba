"""Messages that are nearly right: seeded mutations of valid ones, made from their types alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import NODEFAULT, inspect

Encode = Callable[[Any], bytes]
_AS_MADE = 0.15
_IN_VALUES = 0.45
_DEEP = 1500
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, (1 << 31) - 1, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 0.5, -0.0, 1e308,
    "", "\0", "x" * 300, "\u202e", [], {}, [[]], [{}], {"t": 1}, {"": None}, ["hello"], [0] * 40,
)  # fmt: skip
_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
_BYTES = (
    *(b"\xc1", b"\xff", b"\x00", b"\x80", b"\n", b'"', b"{", b"]", b"\\ud800", b"\x91" * 40),
    # Lengths that nothing follows, text that is none, extensions, and what is no number.
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc6\x7f\xff\xff\xff", b"\xd9\x02\xff\xfe", b"\xc7\x04\x05abcd", b"\xd4\x01\x00"),
    *(b"\xc4\x01\xff", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
)


def mutations(
    kind: Any, seed: str, count: int, encode: Encode, given: Mapping[str, Any]
) -> Iterator[bytes]:
    """So many messages of a type, in bytes; the same ones for the same seed.

    One in seven is as it was made, with values at and just beyond the edges of their types.
    """
    random, info = Random(seed), inspect.type_info(kind)
    values = Values(random, given)
    before = b"\x90"
    for _ in range(count):
        before = _mutation(values.of(info), random, encode, before)
        yield before


def mutated(wholes: Sequence[Any], seed: str, count: int, encode: Encode) -> Iterator[bytes]:
    """So many mutations of these messages, one in seven as it is, likewise."""
    random = Random(seed)
    before = b"\x90"
    for _ in range(count):
        before = _mutation(random.choice(wholes), random, encode, before)
        yield before


def _mutation(whole: Any, random: Random, encode: Encode, before: bytes) -> bytes:
    chance = random.random()
    if chance > _AS_MADE:
        in_values = chance < _AS_MADE + _IN_VALUES
        for _ in range(random.choice((1, 1, 1, 2, 4)) if in_values else 0):
            whole = _changed(whole, random, encode is msgspec.msgpack.encode)
    data = encode(whole)
    if chance > _AS_MADE + _IN_VALUES:
        for _ in range(random.choice((1, 1, 2, 8))):
            data = _damaged(data, before, random)
    return data


def _changed(whole: Any, random: Random, binary: bool) -> Any:  # noqa: FBT001 - of one caller
    """The same with one of its parts replaced, removed, doubled, renamed or wrapped."""
    if not isinstance(whole, (dict, list)) or not whole or random.random() < 0.05:
        return _odd(random, binary)
    copy: Any = whole.copy()
    key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
    part = copy[key]
    if isinstance(part, (dict, list)) and part and random.random() < 0.6:
        copy[key] = _changed(part, random, binary)
        return copy
    match random.randrange(7):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, list):
            copy.insert(key, part)
        case 1:
            copy[random.choice(("extra", "", "x" * 300, "id", "t", "é"))] = part
        case 2:
            copy[key] = [part]
        case 3:
            other = random.choice(list(copy)) if isinstance(copy, dict) else len(copy) // 2
            copy[key], copy[other] = copy[other], part
        case _:
            copy[key] = _odd(random, binary)
    return copy


def _odd(random: Random, binary: bool) -> Any:  # noqa: FBT001 - likewise
    if binary and random.random() < 0.2:
        return random.choice((b"", b"\xff\xfe", msgspec.msgpack.Ext(1, b"a"), *_NOT_FINITE))
    return random.choice(_ODD)


def _damaged(data: bytes, other: bytes, random: Random) -> bytes:
    """The same with some of its bytes changed; `other` is another message."""
    place = random.randrange(len(data) + 1)
    before, behind = data[:place], data[place:]
    if random.random() < 0.003:
        return random.choice((b"\x91", b"\x81\xa1t", b"[", b'{"t":')) * _DEEP
    ways = (
        lambda: before + bytes([random.randrange(256)]) + behind[1:],
        lambda: before + random.choice(_BYTES) + behind[random.randrange(2) :],
        lambda: before,
        lambda: before + behind[random.randrange(1, 9) :],
        lambda: before + other[random.randrange(len(other) + 1) :],
        lambda: before + random.randbytes(random.randrange(1, 16)) + behind,
        lambda: data + random.choice(_BYTES),
    )
    return random.choice(ways)()


TEXTS = (
    *("", "a", "b", "x y", "grüße 🙂", "\0", "<|im_end|>", "queue_full", "00-"),
    *("é" * 40, "x" * 300),
)
"""Few of them, so that ids meet again."""


_EDGE = 0.1
_OPTIONAL = 0.2
_ITEMS = 3
_LARGEST = 9
_DEPTH = 3


class Values:
    """Makes values; `given` has those for fields of a name, of which nothing else makes sense."""

    def __init__(self, random: Random, given: Mapping[str, Any]) -> None:
        self._random = random
        self._given = given
        self._makers: dict[type, Callable[[Any], Any]] = {
            inspect.StructType: self._struct,
            inspect.UnionType: lambda kind: self.of(random.choice(kind.types)),
            inspect.IntType: self._int,
            inspect.FloatType: self._float,
            inspect.StrType: lambda kind: random.choice(TEXTS[bool(kind.min_length) :]),
            inspect.BytesType: lambda _: random.choice(TEXTS).encode(),
            inspect.BoolType: lambda _: random.random() < 0.5,
            inspect.LiteralType: lambda kind: random.choice(kind.values),
            inspect.ListType: self._items,
            inspect.VarTupleType: self._items,
            inspect.TupleType: lambda kind: [self.of(one) for one in kind.item_types],
            inspect.DictType: self._dict,
            inspect.NoneType: lambda _: None,
            inspect.AnyType: lambda _: self._tree(_DEPTH),
        }

    def of(self, kind: inspect.Type) -> Any:
        """A value in the builtin types that decodes as `kind`, or hardly misses it.

        A type that is new to this module raises KeyError: say above how its values are made.
        """
        return self._makers[type(kind)](kind)

    def _int(self, kind: inspect.IntType) -> int:
        low = kind.ge if kind.ge is not None else 0
        high = kind.le if kind.le is not None else _LARGEST
        if self._random.random() < _EDGE:
            return self._random.choice((low, high, low - 1, high + 1))
        return self._random.randint(low, min(high, low + _LARGEST))

    def _float(self, kind: inspect.FloatType) -> float:
        edges = [one for one in (kind.ge, kind.gt, kind.le, kind.lt) if one is not None]
        if edges and self._random.random() < 2 * _EDGE:
            return self._random.choice(edges)
        low = kind.ge if kind.ge is not None else kind.gt or 0.0
        high = min(kind.le if kind.le is not None else 1.0, low + 2.0)
        return self._random.uniform(low, high)

    def _items(self, kind: Any) -> list[Any]:
        count = self._random.randint(kind.min_length or 0, _ITEMS)
        return [self.of(kind.item_type) for _ in range(count)]

    def _dict(self, kind: inspect.DictType) -> dict[Any, Any]:
        pairs = range(self._random.randint(0, _ITEMS))
        return {self.of(kind.key_type): self.of(kind.value_type) for _ in pairs}

    def _tree(self, depth: int) -> Any:
        """A value of JSON, a few levels deep."""
        if depth == 0 or self._random.random() < 0.5:
            return self._random.choice((*TEXTS, None, True, -1, 0.5, 1 << 63))
        parts = [self._tree(depth - 1) for _ in range(self._random.randint(0, _ITEMS))]
        named = self._random.random() < 0.5
        return dict(zip(TEXTS, parts, strict=False)) if named else parts

    def _struct(self, kind: inspect.StructType) -> Any:
        values: dict[str, Any] = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        for field in kind.fields:
            optional = field.default is not NODEFAULT or field.default_factory is not NODEFAULT
            if not kind.array_like and optional and self._random.random() > _OPTIONAL:
                continue
            known = self._given.get(field.name)
            if known is not None and self._random.random() > _EDGE:
                values[field.encode_name] = self._random.choice(known)
            else:
                values[field.encode_name] = self.of(field.type)
        return list(values.values()) if kind.array_like else values
