"""Values of message types, made from the types alone, so that a new field is covered by itself."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from msgspec import NODEFAULT, inspect

TEXTS = (
    *("", "a", "b", "x y", "grüße 🙂", "\0", "<|im_end|>", "queue_full", "00-"),
    *("é" * 40, "x" * 300),
)
"""Few of them, so that ids meet again."""
_EDGE = 0.1
_OPTIONAL = 0.2
_ITEMS = 3
_LARGEST = 9


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
