"""A JSON body, and its objects taken apart field by field."""

from __future__ import annotations

from typing import Any

import msgspec

from hearth_http.errors import BAD_REQUEST, ApiError, invalid, unsupported

_MOST_VALUES = 1 << 19
"""Values of a body: each takes far more memory than its bytes."""
_MOST_NAME = 64


def decode(body: bytes) -> Fields:
    """The fields of a body; raises ApiError for one that is no JSON object."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > _MOST_VALUES:
        raise ApiError(BAD_REQUEST, "bad_message", "the body has too many values")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(BAD_REQUEST, "bad_message", "the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(BAD_REQUEST, "bad_message", "the body is not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise ApiError(BAD_REQUEST, "bad_message", "the body is not a JSON object")
    return Fields(value)


class Fields:
    """An object of a request; `end` refuses what nobody has taken. null is as good as missing."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid(path, "must be an object")
        self._left = {name: one for name, one in value.items() if one is not None}
        self._path = path

    def at(self, name: str) -> str:
        """The path of a field."""
        name = name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}..."
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> Any:
        """The value of a field; None where it is not given."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """A field that is text."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(self.at(name), "must be text")
        return value

    def needed(self, name: str) -> str:
        """A text that has to be there."""
        value = self.text(name)
        if value is None:
            raise invalid(self.at(name), "is missing: it must be text")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A field that is true or false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(self.at(name), "must be true or false")
        return default if value is None else value

    def items(self, name: str) -> list[tuple[str, Any]]:
        """The items of a list, each with its path; none where it is not given."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid(self.at(name), "must be a list")
        return [(f"{self.at(name)}[{index}]", one) for index, one in enumerate(value)]

    def inner(self, name: str) -> Fields | None:
        """A field that is an object of its own."""
        value = self.take(name)
        return None if value is None else Fields(value, self.at(name))

    def part(self, name: str) -> Fields:
        """An object that has to be there."""
        found = self.inner(name)
        if found is None:
            raise invalid(self.at(name), "is missing: it must be an object")
        return found

    def some(self, *names: str) -> dict[str, Any]:
        """Values of these fields by name, as far as they are given."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def only(self, name: str, *values: Any) -> None:
        """Take a field that may have these values alone."""
        value = self.take(name)
        # 0 is equal to false.
        if value is not None and (type(value), value) not in [(type(one), one) for one in values]:
            told = ", ".join(msgspec.json.encode(one).decode() for one in values)
            raise unsupported(self.at(name), f"may be {told} alone" if told else "is not offered")

    def end(self) -> None:
        """Refuse the first field that is left."""
        for name in self._left:
            raise unsupported(self.at(name), "is no option here: leave it out")
