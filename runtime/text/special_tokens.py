import re
import secrets
from collections.abc import Iterable

import tokenizers

from runtime.engine_folder import TOKENIZER_FILE
from runtime.errors import HearthError
from runtime.text.disguise import Disguise, SpecialText, alternatives

_PRIVATE = "\U0010fffd"


class SpecialTokens:
    """A tokenizer's markers, told apart by whether the template or somebody's text wrote them.

    Markers are its added tokens, special or plain, but plain ones of white space or of one letter,
    which mark nothing. Each gets a private twin: an added token with the same white space rules
    that is not special, with a spelling that nobody can guess. Text in which the template's markers
    have their twins' spellings is encoded with the recognition of markers off; then twins become
    the real ids, and what a user wrote has stayed text.

    `ids` are the special ones, which do not show in text. `size` is one more than the highest id
    before the twins are added. `unknown` is the id that stands for text without a token. Raises
    `engine_corrupt` when ids have gaps that twins would fall into.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, size: int, unknown: int | None) -> None:
        added = tokenizer.get_added_tokens_decoder()
        marks = {n: token for n, token in added.items() if token.special or _marks(token)}
        self.ids = frozenset(n for n, token in marks.items() if token.special)
        self._always_torn = {
            token.content: n
            for n, token in marks.items()
            if not token.special and token.normalized and _is_changed(tokenizer, token.content)
        }
        told = {n: one for n, one in marks.items() if one.content not in self._always_torn}
        # The switch of the library that turns recognition off is for special tokens alone.
        tokenizer.add_special_tokens([_copy(one, one.content) for one in told.values()])
        nonce = _PRIVATE + secrets.token_hex(8)
        self._twins = {token.content: f"{nonce}{n}{_PRIVATE}" for n, token in told.items()}
        self._border = nonce + _PRIVATE
        twins = [_copy(token, self._twins[token.content]) for token in told.values()]
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
        self._real = {numbers[self._twins[token.content]]: n for n, token in told.items()}
        self._refused = told.keys() - {unknown}
        self._written = _as_written(told.values())
        self._markers = SpecialText([token.content for token in marks.values()])
        self._special = SpecialText([marks[number].content for number in self.ids])

    def disguise(self) -> Disguise:
        """Fresh stand-ins for the markers in the text of one conversation."""
        return Disguise(self._markers, self._special)

    def spell(self, rendered: str, disguise: Disguise, *, torn: bool) -> str:
        """What to encode for a rendered template: twins for its tokens, users' text revealed.

        With `torn`, a border keeps each hidden piece from being read as one token.
        """
        marked = self._written.sub(lambda match: self._twins[match[0]], rendered)
        return disguise.reveal(marked, self._border, None if torn else self._always_torn)

    def real_ids(self, ids: Iterable[int], rendered: str = "") -> list[int] | None:
        """`ids` with twins replaced; None where somebody's text has become a marker."""
        found: list[int] = []
        for number in ids:
            if number in self._refused:
                return None
            if number != self._border_id:
                found.append(self._real.get(number, number))
        for content, number in self._always_torn.items():
            if found.count(number) > rendered.count(content):
                return None
        return found


def _marks(token: tokenizers.AddedToken) -> bool:
    """Tell whether a plain token may mean something beside its text."""
    content = token.content
    return not (not content.strip() or (len(content) == 1 and content.isalnum()))


def _is_changed(tokenizer: tokenizers.Tokenizer, content: str) -> bool:
    """Tell whether normalising changes a token's text, as where each word gets a leading sign.

    Then it is found where text becomes the same, which no twin is: recognition stays on.
    """
    normalizer = tokenizer.normalizer
    return normalizer is not None and normalizer.normalize_str(content) != content


def _copy(token: tokenizers.AddedToken, spelling: str) -> tokenizers.AddedToken:
    """A token with other text or as special; a twin of a special one is never normalised."""
    own = spelling == token.content
    return tokenizers.AddedToken(
        spelling,
        single_word=own and token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        special=own,
        normalized=token.normalized and (own or not token.special),
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
