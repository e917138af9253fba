import re
import secrets
from collections.abc import Iterable

import tokenizers

from runtime.engine_folder import TOKENIZER_FILE
from runtime.errors import HearthError
from runtime.text.disguise import Disguise, SpecialText, alternatives

_PRIVATE = "\U0010fffd"


class SpecialTokens:
    """A tokenizer's special tokens, told apart by whether the template or a user wrote them.

    Every special token gets a private twin: an added token with the same white space rules that
    is not special, with a spelling that nobody can guess. Text in which the template's special
    tokens have their twins' spellings is encoded with the recognition of special tokens off;
    then twins become the real ids, and what a user wrote has stayed text.

    `size` is one more than the highest id before the twins are added. `unknown` is the id that
    stands for text without a token. Raises `engine_corrupt` when ids have gaps that twins would
    fall into.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, size: int, unknown: int | None) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {number: token for number, token in added.items() if token.special}
        self.ids = frozenset(special)
        nonce = _PRIVATE + secrets.token_hex(8)
        self._twins = {token.content: f"{nonce}{n}{_PRIVATE}" for n, token in special.items()}
        self._border = nonce + _PRIVATE
        twins = [_twin(token, self._twins[token.content]) for token in special.values()]
        border = tokenizers.AddedToken(self._border, special=False, normalized=False)
        tokenizer.add_tokens([border, *twins])
        numbers = {t.content: n for n, t in tokenizer.get_added_tokens_decoder().items()}
        self._border_id = numbers[self._border]
        if self._border_id < size:
            raise HearthError(
                "engine_corrupt",
                f"{TOKENIZER_FILE} leaves out ids below {size}: use a tokenizer without gaps",
                TOKENIZER_FILE,
            )
        self._real = {numbers[self._twins[token.content]]: n for n, token in special.items()}
        self._refused = self.ids - {unknown}
        self._written = _as_written(special.values())
        self._text = SpecialText(self._twins.keys())

    def disguise(self) -> Disguise:
        """Fresh stand-ins for the special-token text of one conversation."""
        return Disguise(self._text)

    def spell(self, rendered: str, disguise: Disguise, *, torn: bool) -> str:
        """What to encode for a rendered template: twins for its tokens, users' text revealed.

        With `torn`, a border keeps each hidden piece from being read as one token.
        """
        marked = self._written.sub(lambda match: self._twins[match[0]], rendered)
        return disguise.reveal(marked, self._border if torn else "")

    def real_ids(self, ids: Iterable[int]) -> list[int] | None:
        """`ids` with twins replaced; None where a user's text has become a special token."""
        found: list[int] = []
        for number in ids:
            if number in self._refused:
                return None
            if number != self._border_id:
                found.append(self._real.get(number, number))
        return found


def _twin(token: tokenizers.AddedToken, spelling: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        spelling, lstrip=token.lstrip, rstrip=token.rstrip, special=False, normalized=False
    )


def _as_written(special: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    # Longest first, and single words only between other characters, as the tokenizer matches.
    longest_first = sorted(special, key=lambda token: len(token.content), reverse=True)
    return alternatives(
        rf"(?<!\w){re.escape(token.content)}(?!\w)"
        if token.single_word
        else re.escape(token.content)
        for token in longest_first
    )
