from collections.abc import Callable

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

    def finish(self) -> str:
        """What was held back, with U+FFFD where the tokens end inside a character."""
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
