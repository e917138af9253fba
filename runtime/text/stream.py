import re
from collections.abc import Callable, Sequence

from hearth.runtime.errors import HearthError
from hearth.runtime.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character has at most 3 bytes, each of which may show as one U+FFFD.
_MOST_HELD = 3
# So many tokens without a complete character are not the beginning of one.
_PATIENCE = 16
_CONTEXT = 8


class IncrementalDecoder:
    """Text of a growing list of token ids, released as its characters become complete.

    `decode` turns ids into text, with U+FFFD for bytes that are no character. Only a window of
    ids is decoded, from the last but one place where a character ended: decoders look at the
    token before at most (a leading space, for example).
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = ""
        self._complete = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it completes, perhaps none."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        overdue = len(self._ids) - self._complete > _PATIENCE
        settled = _settled(text, overdue=overdue)
        if not settled.startswith(self._shown):
            if not overdue:
                return ""
            settled = text
        new = settled[len(self._shown) :]
        self._shown = settled
        if settled == text:
            self._forget(text, self._complete)
            self._complete = len(self._ids)
        elif overdue:
            self._forget(text, len(self._ids) - _CONTEXT)
        return new

    def flush(self) -> str:
        """Release the held text, with U+FFFD where the tokens end inside a character."""
        # What ends inside a character would not go on as what was released of it.
        return self.finish() if self._complete < len(self._ids) else ""

    def finish(self) -> str:
        """Return the held text, with U+FFFD where the tokens end inside a character."""
        rest = self._decode(self._ids)[len(self._shown) :]
        self._ids, self._shown, self._complete = [], "", 0
        return rest

    def _forget(self, text: str, count: int) -> None:
        """Drop the first `count` tokens, provided that the others read the same without them."""
        if not count:
            return
        tail = self._decode(self._ids[count:])
        held = len(text) - len(self._shown)
        if text.endswith(tail) and held <= len(tail):
            del self._ids[:count]
            self._shown = tail[: len(tail) - held]
            self._complete = max(0, self._complete - count)


def _settled(text: str, *, overdue: bool) -> str:
    complete = text.rstrip(_REPLACEMENT)
    # A byte token can turn its whole run of bytes into U+FFFD and the next one turn it back, so
    # all of them wait, but not for ever.
    return text[:-_MOST_HELD] if overdue and len(text) > len(complete) + _MOST_HELD else complete


class TokenBytes:
    """Bytes of single tokens, which need not be whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A token at the beginning may lose its blank.
        self._before = tokenizer.encode("a")[-1:]
        self._skipped = len(tokenizer.decode(self._before))

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; those of its spelling where it does not show in text."""
        spelling = self._tokenizer.spelling(token_id)
        if not self._tokenizer.has_text(token_id):
            return spelling.encode()
        text = self._tokenizer.decode([*self._before, token_id])[self._skipped :]
        if _REPLACEMENT not in text:
            return text.encode()
        if match := _BYTE.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        known = all(character in _BYTE_LEVEL for character in spelling)
        return bytes(map(_BYTE_LEVEL.__getitem__, spelling)) if known else text.encode()


def _byte_level() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies, as those of GPT-2.

    Printable ones of Latin-1 stand for themselves, the others for the characters from U+0100 on.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in shown]
    moved = {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in shown} | moved


_BYTE_LEVEL = _byte_level()
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class StopMatcher:
    """Cuts a stream of text before the first place where one of the `stop` strings begins.

    The result does not depend on how the text is split: a match waits while a longer one that
    begins earlier is still possible. `matched` is the string that did.
    Raises `invalid_value` for an empty stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise HearthError("invalid_value", "a stop string has at least 1 character", "stop")
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns what can be released now, nothing once a stop string matched."""
        if self.matched is not None or not text:
            return ""
        held = self._held + text
        found = self._found(held)
        possible = self._possible(held)
        if found <= possible and found < len(held):
            self.matched = self._string_at(held, found)
            possible, held = found, held[:found]
        self._held = held[possible:]
        return held[:possible]

    def finish(self) -> str:
        """The text still held when nothing more comes, up to a match in it."""
        held, self._held = self._held, ""
        found = self._found(held)
        if self.matched is None and found < len(held):
            self.matched = self._string_at(held, found)
        return held[:found]

    def _found(self, text: str) -> int:
        """Index of the first match; the length of `text` when there is none."""
        starts = (text.find(stop) for stop in self._stop)
        return min((start for start in starts if start >= 0), default=len(text))

    def _string_at(self, text: str, start: int) -> str:
        return min((stop for stop in self._stop if text.startswith(stop, start)), key=len)

    def _possible(self, text: str) -> int:
        """Index of a match that more text could complete; else the length of `text`."""
        first = max(0, len(text) - self._longest + 1)
        return next((n for n in range(first, len(text)) if self._begins(text[n:])), len(text))

    def _begins(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)


class TextStream:
    """The text of one generation, token by token, up to a stop string.

    Released text is always complete characters; special tokens do not show. Raises
    `invalid_value` for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer.decode)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """True if a stop string matched; no text of or after it was released."""
        return self._matcher.matched is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched, the shortest where several begin there."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be released now."""
        if self.stopped or not self._tokenizer.has_text(token_id):
            return ""
        return self._matcher.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """Release what was held back; U+FFFD replaces a character that was cut."""
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()
