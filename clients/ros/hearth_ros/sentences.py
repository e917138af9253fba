"""Sentences of a reply, as they end."""

import re

# One start for a run of signs: a search takes time by the length of the text and not its square.
# The white space behind a sentence tells its end from the point in 3.5; CJK writes none there.
_END = re.compile(r"(?<![.!?…])[.!?…]+[\"')\]»”’]*(?=\s)|[。！？]+[」』”’]*(?=[^」』”’。！？])|\n")  # noqa: RUF001 - CJK has signs of its own
_NO_END = re.compile(
    r"(?:^|[\s(])(?:(?:e\.g|i\.e|Mr|Mrs|Ms|Dr|Prof|St|vs|approx|z\.B|d\.h|bzw)|[A-Z]|\d{1,3})\.$"
)
_PAUSE = re.compile(r"[,;:、，；]\s*|\s+")  # noqa: RUF001 - likewise


class SentenceSplitter:
    """Sentences of text that comes in pieces, each without white space around it.

    A sentence ends with its sign, a line with its end. What has no end within `most` characters is
    cut at the last pause, for a speech node that should not wait.
    """

    def __init__(self, most: int = 300) -> None:
        self._most = most
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Take in more text; returns the sentences that have ended."""
        self._rest += text
        found, at = [], 0
        while (end := self._end(at)) is not None:
            sentence, at = self._rest[at:end].strip(), end
            if sentence:
                found.append(sentence)
        self._rest = self._rest[at:]
        return found

    def flush(self) -> list[str]:
        """Take what is left at the end of the reply, one sentence or none."""
        rest, self._rest = self._rest.strip(), ""
        return [rest] if rest else []

    def _end(self, at: int) -> int | None:
        """End of the sentence that begins there, as far as it can be told."""
        limit = at + self._most
        for match in _END.finditer(self._rest, at, limit + 1):
            if match[0] == "\n" or not _NO_END.search(self._rest[at : match.end()]):
                return match.end()
        if len(self._rest) <= limit:
            return None
        pauses = [one.end() for one in _PAUSE.finditer(self._rest, at + 1, limit)]
        return pauses[-1] if pauses else limit
