import re
from collections.abc import Collection, Iterable

from runtime.errors import HearthError

# Lone surrogates: no valid text has them, so none can be taken for a piece of a message.
_STAND_INS = range(0xD800, 0xE000)
_STAND_IN = re.compile("[\ud800-\udfff]")


class SpecialText:
    """The spellings of tokens, prepared for finding them and their broken-off ends."""

    def __init__(self, spellings: Collection[str]) -> None:
        self._whole = alternatives(re.escape(s) for s in sorted(spellings, key=len, reverse=True))
        self._heads = frozenset(s[:end] for s in spellings for end in range(1, len(s)))
        self._tails = frozenset(s[start:] for s in spellings for start in range(1, len(s)))
        self._longest = max(map(len, self._heads), default=0)

    def replace_whole(self, text: str, disguise: "Disguise") -> str:
        """`text` with stand-ins for whole tokens."""
        return self._whole.sub(lambda match: disguise.stand_in(match[0]), text)

    def head_at_end(self, text: str) -> int:
        """Characters at the end of `text` that begin a token."""
        return next((n for n in self._lengths(text) if text[-n:] in self._heads), 0)

    def tail_at_start(self, text: str) -> int:
        """Characters at the start of `text` that end a token."""
        return next((n for n in self._lengths(text) if text[:n] in self._tails), 0)

    def _lengths(self, text: str) -> range:
        return range(min(self._longest, len(text)), 0, -1)


class Disguise:
    """Hides the markers in messages from a chat template, and brings them back afterwards.

    Each hidden piece is one character, so templates may trim, split and compare around it.
    Hidden are whole markers, and at the ends of a message what text next to it could complete to
    one. A template that deletes text inside of a message is not provided for. Of the model's own
    words only special tokens are hidden: templates look for plain ones, as `</think>` is.
    """

    def __init__(self, markers: SpecialText, special: SpecialText) -> None:
        self._markers = markers
        self._special = special
        self._stand_ins: dict[str, str] = {}
        self._pieces: dict[str, str] = {}

    def hide(self, text: str, *, own: bool = False) -> str:
        """`text` with stand-ins; raises `invalid_value` when there are too many to tell apart.

        `own` are words of the model.
        """
        hidden = self._special if own else self._markers
        text = hidden.replace_whole(text, self)
        # Templates trim messages, so the ends are those of the text without white space.
        body = text.strip()
        before, _, after = text.partition(body) if body else (text, "", "")
        if size := hidden.head_at_end(body):
            body = body[:-size] + self.stand_in(body[-size:])
        if size := hidden.tail_at_start(body):
            body = self.stand_in(body[:size]) + body[size:]
        return before + body + after

    def reveal(self, text: str, border: str = "", torn: Collection[str] | None = None) -> str:
        """`text` with the hidden pieces back, `border` after the first character of each.

        Where `torn` is given, only those among it are torn.
        """

        def piece(match: re.Match[str]) -> str:
            whole = self._pieces[match[0]]
            return (
                whole if torn is not None and whole not in torn else whole[0] + border + whole[1:]
            )

        return _STAND_IN.sub(piece, text)

    def stand_in(self, piece: str) -> str:
        """The character that stands for `piece`, the same every time."""
        if piece not in self._stand_ins:
            if len(self._stand_ins) == len(_STAND_INS):
                raise HearthError(
                    "invalid_value", "the messages spell too many special tokens", "messages"
                )
            character = chr(_STAND_INS[len(self._stand_ins)])
            self._stand_ins[piece] = character
            self._pieces[character] = piece
        return self._stand_ins[piece]


def alternatives(patterns: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `patterns`, the first that fits; none of none."""
    return re.compile("|".join(patterns) or "(?!)")
