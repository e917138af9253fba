"""Size of a prefill chunk while other rows wait for their next token; reads no clock."""

from collections.abc import Sequence
from typing import NamedTuple

from hearth.runtime.ewma import Ewma

LEAST_TOKENS = 16
"""Tokens that a chunk may always have, however slow the engine is."""
_NEWEST = 0.1
"""Weight of the newest chunk in the moving averages of chunk costs."""


class Prompt(NamedTuple):
    """A prefilling row: its filled slots, and the tokens of its prompt that are left."""

    filled: int
    left: int


class Chunk(NamedTuple):
    """Number of prefilling rows in a chunk, the first ones, and the most tokens of one of them."""

    rows: int
    width: int


class PrefillBudget:
    """Size chunks by measured speeds; `decode_s` are the seconds of a decode step.

    A chunk has a fixed cost, that of a decode step, and a cost for each token that it computes,
    padding included. The latter may be `share` decode steps in all. Where there are `widths` to
    which chunks are padded, a piece of a prompt fills one of them.
    """

    def __init__(
        self,
        chunk: int,
        capacity: int,
        share: float,
        decode_s: Ewma,
        widths: Sequence[int] = (),
    ) -> None:
        self._chunk = chunk
        self._capacity = capacity
        self._share = share
        self._widths = widths
        self._decode_s = decode_s
        # Apart, not as a quotient: a chunk of few tokens says little about the cost of one.
        self._beyond_s = Ewma(_NEWEST, 0.0)
        self._computed = Ewma(_NEWEST, 0.0)

    def record(self, computed: int, seconds: float) -> None:
        """Record the `seconds` of a chunk of `computed` tokens, padding included."""
        if self._decode_s.value:
            self._beyond_s.add(seconds - self._decode_s.value)
            self._computed.add(computed)

    @property
    def tokens(self) -> int:
        """Number of tokens that a chunk may compute while rows decode."""
        if not self._computed.value:
            return max(LEAST_TOKENS, self._chunk)
        a_token = max(self._beyond_s.value, 0.0) / self._computed.value
        allowed = self._share * self._decode_s.value
        most = self._chunk * self._capacity
        return max(LEAST_TOKENS, int(min(most, allowed / a_token))) if a_token else most

    def choose(self, prompts: Sequence[Prompt], *, limited: bool) -> Chunk:
        """Choose the next chunk of `prompts`, which come with the shortest rest first.

        `limited` where rows decode. A further row shares the chunk if the one before it gets no
        less for that, and if start and width stay within the capacity for each.
        """
        most = self._whole(self.tokens) if limited else self._chunk * len(prompts)
        width = min(prompts[0].left, self._chunk, most)
        start = prompts[0].filled
        for rows, prompt in enumerate(prompts[1:], 1):
            wider = min(prompt.left, self._chunk, most // (rows + 1))
            start = max(start, prompt.filled)
            if wider < width or start + wider > self._capacity:
                return Chunk(rows, width)
            width = wider
        return Chunk(len(prompts), width)

    def _whole(self, tokens: int) -> int:
        """The widest of the widths within `tokens`, or the narrowest."""
        if not self._widths:
            return tokens
        return max((one for one in self._widths if one <= tokens), default=self._widths[0])
