"""Sentences of a reply, as they end."""

import re

# The white space behind a sentence tells its end from the point in 3.5; CJK writes none there.
_END = re.compile(r"[.!?…]+[\"')\]»”’]*(?=\s)|[。！？]+[」』”’]*(?=[^」』”’。！？])|\n")  # noqa: RUF001 - CJK has signs of its own
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
        self._searched = 0

    def feed(self, text: str) -> list[str]:
        """Take in more text; returns the sentences that have ended."""
        self._rest += text
        found = []
        while (end := self._end()) is not None:
            sentence, self._rest = self._rest[:end].strip(), self._rest[end:]
            self._searched = 0
            if sentence:
                found.append(sentence)
        return found

    def flush(self) -> list[str]:
        """Take what is left at the end of the reply, one sentence or none."""
        rest, self._rest, self._searched = self._rest.strip(), "", 0
        return [rest] if rest else []

    def _end(self) -> int | None:
        for match in _END.finditer(self._rest, self._searched):
            if match[0] == "\n" or not _NO_END.search(self._rest[: match.end()]):
                return match.end()
            self._searched = match.end()
        if len(self._rest) <= self._most:
            return None
        pauses = [one.end() for one in _PAUSE.finditer(self._rest, 1, self._most)]
        return pauses[-1] if pauses else self._most
