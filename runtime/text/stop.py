from collections.abc import Sequence

from runtime.errors import HearthError


class StopMatcher:
    """Cuts a stream of text before the first place where one of the `stop` strings begins.

    The result does not depend on how the text is split: a match waits while a longer one that
    begins earlier is still possible. Raises `invalid_value` for an empty stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise HearthError("invalid_value", "a stop string has at least 1 character", "stop")
        self.matched = False
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns what can be released now, nothing once a stop string matched."""
        if self.matched or not text:
            return ""
        held = self._held + text
        found = self._found(held)
        possible = self._possible(held)
        if found <= possible and found < len(held):
            self.matched = True
            possible, held = found, held[:found]
        self._held = held[possible:]
        return held[:possible]

    def finish(self) -> str:
        """The text still held when nothing more comes, up to a match in it."""
        held, self._held = self._held, ""
        found = self._found(held)
        self.matched = self.matched or found < len(held)
        return held[:found]

    def _found(self, text: str) -> int:
        """Where the first match begins; the length of `text` when there is none."""
        starts = (text.find(stop) for stop in self._stop)
        return min((start for start in starts if start >= 0), default=len(text))

    def _possible(self, text: str) -> int:
        """Where a match could begin that more text would complete; else the length."""
        first = max(0, len(text) - self._longest + 1)
        return next((n for n in range(first, len(text)) if self._begins(text[n:])), len(text))

    def _begins(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)
