"""What of the pages that are known is loaded, and what that took."""

import time
from collections import deque

from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.disk_tier import DiskTier
from hearth.runtime.kv_cache.page_pool import Loaded, PagePool
from hearth.runtime.kv_cache.pages import PAGE_TOKENS, Match, Page, Tier

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


class LoadCostModel:
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


class PageLoads:
    """Loads pages where that takes less than computing them, from memory or from files.

    Files are read where it is decided, and checked, so what is taken is there when rows have their
    places: `most_read` pages at a time at the most.
    """

    def __init__(
        self, pool: PagePool, disk: DiskTier | None, cost_model: LoadCostModel, most_read: int
    ) -> None:
        self.skipped = 0
        """Tokens that were there and are computed all the same, as loading takes longer."""
        self._pool, self._disk, self._cost_model = pool, disk, cost_model
        self._most_read = most_read
        self._data: dict[Page, bytes] = {}
        self._read_s: dict[Page, float] = {}
        self._damaged: list[tuple[Page, HearthError]] = []
        self._under_way = deque[tuple[Loaded, float]]()

    def take(self, match: Match) -> Match:
        """What of a match to load; that has to be held until it is loaded."""
        self._take_note()
        wanted = match.cut(self._cost_model.tokens(match))
        self.skipped += match.tokens - wanted.tokens
        for number, page in enumerate(wanted.pages):
            if page.place is None and page not in self._data and not self._read(page):
                return wanted.cut(number * PAGE_TOKENS)
        return wanted

    def take_damaged(self) -> list[tuple[Page, HearthError]]:
        """The pages whose files gave an error since this was asked the last time."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def load(self, match: Match, row: int, filled: int, drafted: int) -> None:
        """Copy what was taken of a match into the first slots of a row."""
        read_s = sum(self._read_s.get(page, 0.0) for page in match.pages)
        for loaded in self._pool.load(match.pages, row, filled, drafted, self._data):
            self._under_way.append((loaded, read_s if loaded.tier == "disk" else 0.0))

    def done(self) -> None:
        """All that was taken has been loaded, or will not be."""
        self._data.clear()
        self._read_s.clear()

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill step has computed so many tokens, those of padding included."""
        self._cost_model.record_computed(tokens, seconds)

    def _read(self, page: Page) -> bool:
        if self._disk is None or len(self._data) >= self._most_read:
            return False
        began = time.monotonic()
        try:
            data = self._disk.read(page)
        except HearthError as error:
            self._damaged.append((page, error))
            return False
        if data is None:
            return False
        self._data[page] = data
        self._read_s[page] = time.monotonic() - began
        return True

    def _take_note(self) -> None:
        while self._under_way and (seconds := self._under_way[0][0].span.seconds) is not None:
            loaded, read_s = self._under_way.popleft()
            self._cost_model.record_loaded(loaded.tier, loaded.tokens, seconds + read_s)
