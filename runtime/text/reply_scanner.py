"""Text that comes in pieces, read by descent: marks, JSON values and literals of Python."""

import math
import re
import sys
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, TypeVar, cast

from hearth.runtime.text.conversation import MAX_DEPTH

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader that gives way wherever it needs more text, and returns a `T`."""

_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_CONSTANTS = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_LONGEST_ESCAPE = 6
_CODE = {"x": 2, "u": 4, "U": 8}
_SURROGATES = range(0xD800, 0xE000)
_LONGEST_NUMBER = 400
_BORDER = re.compile(r"\s+|(?<=[\ud800-\udfff])|(?<=.)(?=[\[{\]}]$)")


class NotThereError(Exception):
    """The text is not what its reader expects."""


class Mark:
    """A mark in text; where it has white space, and next to special tokens, any may stand."""

    def __init__(self, spelling: str) -> None:
        self.parts = [part for part in _BORDER.split(spelling.strip()) if part]
        self.before = spelling[: len(spelling) - len(spelling.lstrip())]
        self.after = spelling[len(spelling.rstrip()) :] if self.parts else ""

    def __bool__(self) -> bool:
        return bool(self.parts)

    def match(self, text: str, at: int) -> int | None:
        """End of the mark that begins at `at`; -1 if there is none, None if more text decides."""
        for number, part in enumerate(self.parts):
            if number:
                at = skip_space(text, at)
            if not text.startswith(part, at):
                return None if part.startswith(text[at:]) else -1
            at += len(part)
        return at


class Found(NamedTuple):
    """A mark in text: the first of several that begins, at `start`, and its `end`.

    Without one `mark` is None, and from `start` on one could still begin.
    """

    mark: Mark | None
    start: int
    end: int


def first_of(marks: Iterable[Mark], text: str, at: int) -> Found:
    """Find the mark that begins first, the longest of those that begin there."""
    best = Found(None, len(text), len(text))
    for mark in marks:
        head = mark.parts[0]
        start = text.find(head[0], at)
        while 0 <= start <= best.start:
            end = mark.match(text, start)
            if end is None:
                if start < best.start:
                    best = Found(None, start, start)
                break
            if end >= 0:
                if start < best.start or (best.mark is not None and end > best.end):
                    best = Found(mark, start, end)
                break
            start = text.find(head[0], start + 1)
    return best


def skip_space(text: str, at: int) -> int:
    """Index of the next character that is no white space."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


class Scanner:
    """Text so far, a place in it, and readers that move the place on.

    Readers raise `NotThereError` where the text is something else, at the latest once it `ended`.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.text = text
        self.at = 0
        self.ended = ended

    def run(self, reading: Reading[T]) -> T:
        """Run a reader on a text that ended."""
        try:
            next(reading)
        except StopIteration as done:
            return cast("T", done.value)
        raise NotThereError

    def more(self) -> Reading[None]:
        """Wait for more text."""
        if self.ended:
            raise NotThereError
        yield

    def space(self) -> Reading[None]:
        """Skip white space."""
        while True:
            self.at = skip_space(self.text, self.at)
            if self.at < len(self.text) or self.ended:
                return
            yield from self.more()

    def peek(self) -> Reading[str]:
        """The next character; none where the text ends."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield from self.more()
        return self.text[self.at]

    def sees(self, mark: Mark, *, cut: bool = False) -> Reading[bool]:
        """True if `mark` comes next, perhaps behind white space; then it is passed.

        With `cut` the text may end within it: a model's end token may stand for the rest.
        """
        yield from self.space()
        while (end := mark.match(self.text, self.at)) is None:
            if self.ended:
                end = len(self.text) if cut and self.at < len(self.text) else -1
                break
            yield from self.more()
        if end >= 0:
            self.at = end
        return end >= 0

    def expect(self, mark: Mark) -> Reading[None]:
        """Pass a mark, and white space before it."""
        if not (yield from self.sees(mark)):
            raise NotThereError

    def until(self, mark: Mark, most: int | None = None) -> Reading[str]:
        """The text before `mark`, which is passed; it has no more than `most` characters."""
        start = looked = self.at
        if not mark:
            raise NotThereError
        while True:
            found = first_of([mark], self.text, looked)
            if most is not None and found.start - start > most:
                raise NotThereError
            if found.mark is not None:
                self.at = found.end
                return self.text[start : found.start]
            looked = found.start
            yield from self.more()

    def word(self, pattern: re.Pattern[str] = _NAME) -> Reading[str]:
        """The longest text that a pattern of single characters matches: a name, if not given."""
        end = self.at
        while True:
            end = self._end_of(pattern, end)
            if end < len(self.text) or self.ended:
                found = self.text[self.at : end]
                self.at = end
                return found
            yield from self.more()

    def json(self, depth: int = 0) -> Reading[str]:
        """The text of one JSON value."""
        yield from self.space()
        start = self.at
        first = yield from self.peek()
        if first == '"':
            yield from self._json_string()
        elif first and first in "{[":
            yield from self._json_items(first, depth)
        else:
            word = yield from self.word(_WORD)
            if word not in {"true", "false", "null"} and not _NUMBER.fullmatch(word):
                raise NotThereError
        return self.text[start : self.at]

    def _json_items(self, first: str, depth: int) -> Reading[None]:
        if depth == MAX_DEPTH:
            raise NotThereError
        close = "}" if first == "{" else "]"
        self.at += 1
        yield from self.space()
        if (yield from self.took(close)):
            return
        while True:
            if first == "{":
                yield from self.space()
                yield from self._json_string()
                yield from self.space()
                yield from self.need(":")
            yield from self.json(depth + 1)
            yield from self.space()
            if (yield from self.took(close)):
                return
            yield from self.need(",")

    def _json_string(self) -> Reading[None]:
        yield from self.need('"')
        while True:
            while (end := self._end_of(_PLAIN, self.at)) == len(self.text):
                self.at = end
                yield from self.more()
            self.at = end
            if (yield from self.took('"')):
                return
            while (end := self._end_of(_ESCAPE, self.at)) == self.at:
                head = self.text[self.at : self.at + _LONGEST_ESCAPE]
                if (
                    not head.startswith("\\")
                    or len(head) == _LONGEST_ESCAPE
                    or (len(head) > 1 and head[1] != "u")
                ):
                    raise NotThereError
                yield from self.more()
            self.at = end

    def _end_of(self, pattern: re.Pattern[str], at: int) -> int:
        """End of what a pattern matches at a place, which is the place itself where it does not.

        A reader that kept the match while it waits would have all of the text copied.
        """
        match = pattern.match(self.text, at)
        return at if match is None else match.end()

    def took(self, text: str) -> Reading[bool]:
        """True if the character `text` comes next; then it is passed."""
        if (yield from self.peek()) != text:
            return False
        self.at += 1
        return True

    def need(self, text: str) -> Reading[None]:
        """Pass the character `text`."""
        if not (yield from self.took(text)):
            raise NotThereError

    def literal(self, quote: Mark | None = None, depth: int = 0) -> Reading[Any]:
        """A value as Python or JSON writes it; with `quote` text between these, and bare keys."""
        yield from self.space()
        first = yield from self.peek()
        if quote and (yield from self.sees(quote)):
            return (yield from self.until(quote))
        if first and first in "\"'":
            return (yield from self._string())
        if first and first in "{[(":
            if depth == MAX_DEPTH:
                raise NotThereError
            self.at += 1
            if first == "{":
                return (yield from self._map(quote, depth + 1))
            return (yield from self._list("]" if first == "[" else ")", quote, depth + 1))
        return plain_value((yield from self.word(_WORD)))

    def _list(self, close: str, quote: Mark | None, depth: int) -> Reading[list[Any]]:
        found: list[Any] = []
        while True:
            yield from self.space()
            if (yield from self.took(close)):
                return found
            found.append((yield from self.literal(quote, depth)))
            yield from self.space()
            if (yield from self.peek()) != close:
                yield from self.need(",")

    def _map(self, quote: Mark | None, depth: int) -> Reading[dict[str, Any]]:
        found: dict[str, Any] = {}
        while True:
            yield from self.space()
            if (yield from self.took("}")):
                return found
            key = yield from (self._key() if quote else self.literal(None, depth))
            yield from self.space()
            yield from self.need(":")
            found[key if isinstance(key, str) else str(key)] = yield from self.literal(quote, depth)
            yield from self.space()
            if (yield from self.peek()) != "}":
                yield from self.need(",")

    def _key(self) -> Reading[str]:
        start = self.at
        while (character := (yield from self.peek())) not in ":{},":
            if not character:
                raise NotThereError
            self.at += 1
        return self.text[start : self.at].strip()

    def named_values(self, close: str) -> Reading[dict[str, Any]]:
        """Arguments as Python has them, `a=1, b="x"`, up to `close`, which is passed."""
        found: dict[str, Any] = {}
        while True:
            yield from self.space()
            if (yield from self.took(close)):
                return found
            key = yield from self.word()
            yield from self.space()
            yield from self.need("=")
            found[key] = yield from self.literal()
            yield from self.space()
            if (yield from self.peek()) != close:
                yield from self.need(",")

    def _string(self) -> Reading[str]:
        quote = self.text[self.at]
        self.at += 1
        found: list[str] = []
        while (character := (yield from self.peek())) != quote:
            if not character:
                raise NotThereError
            self.at += 1
            if character != "\\":
                found.append(character)
                continue
            escape = yield from self.peek()
            self.at += 1
            if escape not in _CODE:
                found.append(_ESCAPES.get(escape, escape))
                continue
            while len(self.text) < self.at + _CODE[escape]:
                yield from self.more()
            found.append(_character(self.text[self.at : self.at + _CODE[escape]]))
            self.at += _CODE[escape]
        self.at += 1
        return "".join(found)


def _character(digits: str) -> str:
    try:
        code = int(digits, 16)
    except ValueError as error:
        raise NotThereError from error
    if code > sys.maxunicode or code in _SURROGATES:
        raise NotThereError
    return chr(code)


def plain_value(word: str) -> bool | int | float | None:
    """A number or constant of Python or JSON; raises `NotThereError` for others."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if len(word) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word):
        raise NotThereError
    if word.lstrip("-").isdigit():
        return int(word)
    value = float(word)
    if not math.isfinite(value):
        raise NotThereError
    return value
