"""Whether loading a prefix takes less than computing it; no clock."""

from collections import deque

from runtime.prefix.identities import PAGE_TOKENS
from runtime.prefix.pages import Match, Tier

_KEPT = 8
_LEAST_KEPT = 64
_EVERY = 16
_TRIALS = 3
"""A single time may be that of a stall."""


class _Pace:
    """What something takes, by the times that were measured.

    A stall makes a time longer and nothing makes it shorter, so the least of the last ones counts,
    a token and in all.
    """

    def __init__(self) -> None:
        self._a_token: deque[float] = deque(maxlen=_KEPT)
        self._in_all: deque[float] = deque(maxlen=_LEAST_KEPT)

    def record(self, tokens: int, seconds: float) -> None:
        self._a_token.append(seconds / tokens)
        self._in_all.append(seconds)

    def seconds(self, tokens: int) -> float:
        """What so many tokens take: nothing as long as it is not known, so that it is tried."""
        if len(self._in_all) < _TRIALS:
            return 0.0
        return max(tokens * min(self._a_token), min(self._in_all))


class Worth:
    """Compares what was measured of loading, tier by tier, with what was measured of computing.

    Computing is taken at its best: a token at what it took in the chunk that took the least for
    each, which is a wide one. Those of each width are kept apart, as there may be none but narrow
    ones for long where much is loaded. Of what is refused one prefix in `_EVERY` is loaded all the
    same, else it would never be known that loading has become faster.
    """

    def __init__(self) -> None:
        self._computed: dict[int, deque[float]] = {}
        self._loaded: dict[Tier, _Pace] = {"device": _Pace(), "host": _Pace(), "disk": _Pace()}
        self._refused = 0

    def record_computed(self, tokens: int, seconds: float) -> None:
        """Take note of a prefill step that computed so many tokens, those of padding included."""
        kept = self._computed.setdefault(tokens.bit_length(), deque(maxlen=_KEPT))
        kept.append(seconds / tokens)

    def record_loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Take note of so many tokens that were loaded from one tier."""
        self._loaded[tier].record(tokens, seconds)

    def tokens(self, match: Match) -> int:
        """Of how many tokens of a match, from the first on, loading saves time."""
        if not self._computed:
            return match.tokens
        a_token = min(map(min, self._computed.values()))
        best = found = 0
        most = spent = 0.0
        for tier, tokens in _by_tier(match):
            found += tokens
            spent += self._loaded[tier].seconds(tokens)
            if found * a_token - spent >= most:
                best, most = found, found * a_token - spent
        if best < match.tokens:
            self._refused += 1
            if self._refused % _EVERY == 0:
                return match.tokens
        return best


def _by_tier(match: Match) -> list[tuple[Tier, int]]:
    """How many tokens of a match lie in each tier, the nearest first, as its pages do."""
    counts: dict[Tier, int] = {}
    for number, page in enumerate(match.pages):
        if page.tier is not None:
            tokens = min(PAGE_TOKENS, match.tokens - number * PAGE_TOKENS)
            counts[page.tier] = counts.get(page.tier, 0) + tokens
    return list(counts.items())
