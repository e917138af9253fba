"""Pages of the prefix cache on their way between memory and files, and which are worth loading."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hearth.runtime.device.device import Span
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.disk_cache import DiskCache
from hearth.runtime.kv_cache.page_pool import STAGED, Loaded, PagePool
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    Change,
    Erase,
    Match,
    Page,
    Place,
    Tier,
    Write,
)

_CLOSING_S = 2.0
_TURN_S = 0.001


@dataclass
class _Leaving:
    page: Page | None
    number: int
    span: Span
    draft: bool


class DiskTier:
    """Write pages once the device has copied them, and read files; never wait for a copy."""

    def __init__(self, pool: PagePool, disk_cache: DiskCache) -> None:
        self._pool = pool
        self.disk_cache = disk_cache
        self._free = list(range(STAGED))
        self._leaving = deque[_Leaving]()
        self._lost: list[Page] = []

    def write(self, page: Page, source: Place, within_s: float = 0.0) -> None:
        """Queue the page at `source` for writing; lost if the queue is full for `within_s`."""
        self.poll(within_s)
        if not self._free:
            self._lost.append(page)
            return
        number = self._free.pop()
        span = self._pool.stage(source, number)
        # The page may get or lose a draft's state before that has ended.
        self._leaving.append(_Leaving(page, number, span, page.draft))
        self.poll(within_s)

    def poll(self, within_s: float = 0.0) -> None:
        """Hand over the pages that the device has copied meanwhile."""
        while self._leaving and self._leaving[0].span.seconds is not None:
            one = self._leaving.popleft()
            if one.page is not None:
                data = self._pool.staged(one.number)
                if not self.disk_cache.write(one.page, data, within_s, draft=one.draft):
                    self._lost.append(one.page)
            self._free.append(one.number)

    def read(self, page: Page) -> bytes | None:
        """Return the bytes of a page; None while it is being written. Raises `spill_invalid`."""
        self.poll()
        if any(leaving.page is page for leaving in self._leaving):
            return None
        return self.disk_cache.read(page)

    def erase(self, name: bytes) -> None:
        """Remove a page from the disk, or from the queue of pages to write."""
        for leaving in self._leaving:
            if leaving.page is not None and leaving.page.name == name:
                leaving.page = None
        self.disk_cache.erase(name)

    def take_lost(self) -> list[Page]:
        """Take the pages that were not written since the last call."""
        lost, self._lost = self._lost, []
        return lost + self.disk_cache.take_lost()

    def close(self, changes: Sequence[Change]) -> None:
        """Apply `changes`, as far as time allows, and end."""
        until = time.monotonic() + _CLOSING_S
        with ExitStack() as closing:
            closing.callback(lambda: self.disk_cache.close(_left(until)))
            for change in changes:
                if isinstance(change, Erase):
                    self.erase(change.name)
                elif isinstance(change, Write):
                    self._wait(until, STAGED - 1)
                    self.write(change.page, change.source, _left(until))
            self._wait(until, 0)

    def _wait(self, until: float, most: int) -> None:
        """Wait until no more than `most` pages are being copied."""
        self.poll(_left(until))
        while len(self._leaving) > most and _left(until):
            time.sleep(_TURN_S)
            self.poll(_left(until))


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


_KEPT = 8
_LEAST_KEPT = 64
_EVERY = 16
_TRIALS = 3
"""Measurements before a pace counts: a single time may be that of a stall."""


class _Pace:
    """Estimate of seconds for a number of tokens, from measured times.

    A stall makes a time longer and nothing makes it shorter. So the estimate takes the least of the
    last times, both for a token and for a whole load.
    """

    def __init__(self) -> None:
        self._a_token: deque[float] = deque(maxlen=_KEPT)
        self._in_all: deque[float] = deque(maxlen=_LEAST_KEPT)

    def record(self, tokens: int, seconds: float) -> None:
        self._a_token.append(seconds / tokens)
        self._in_all.append(seconds)

    def seconds(self, tokens: int) -> float:
        """Estimate the seconds of `tokens`; 0 before enough was measured, so that it is tried."""
        if len(self._in_all) < _TRIALS:
            return 0.0
        return max(tokens * min(self._a_token), min(self._in_all))


class LoadCostModel:
    """Comparison of the measured times of loading tokens, tier by tier, and of computing them.

    A computed token costs its time in the fastest chunk, which is a wide one. Times of each width
    are kept apart, as only narrow chunks may run for long while most prompts are loaded. One
    refused prefix in `_EVERY` is loaded nevertheless, to notice loading that has become faster.
    """

    def __init__(self) -> None:
        self._computed: dict[int, deque[float]] = {}
        self._loaded: dict[Tier, _Pace] = {"device": _Pace(), "host": _Pace(), "disk": _Pace()}
        self._refused = 0

    def record_computed(self, tokens: int, seconds: float) -> None:
        """Record the `seconds` of a prefill step of `tokens`, padding included."""
        kept = self._computed.setdefault(tokens.bit_length(), deque(maxlen=_KEPT))
        kept.append(seconds / tokens)

    def record_loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Record the `seconds` of loading `tokens` from a tier."""
        self._loaded[tier].record(tokens, seconds)

    def tokens(self, match: Match) -> int:
        """Number of tokens of a match, from the first on, whose loading saves time."""
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
    """Count the tokens of a match in each tier, in the order of its pages."""
    counts: dict[Tier, int] = {}
    for number, page in enumerate(match.pages):
        if page.tier is not None:
            tokens = min(PAGE_TOKENS, match.tokens - number * PAGE_TOKENS)
            counts[page.tier] = counts.get(page.tier, 0) + tokens
    return list(counts.items())


class PageLoads:
    """Loader of pages, from memory or from files, if that takes less time than computing them.

    The decision reads and checks files, at most `most_read` pages at a time, so that their bytes
    are there when rows get their places.
    """

    def __init__(
        self, pool: PagePool, disk: DiskTier | None, cost_model: LoadCostModel, most_read: int
    ) -> None:
        self.skipped = 0
        """Number of cached tokens that are computed all the same, as loading takes longer."""
        self._pool, self._disk, self._cost_model = pool, disk, cost_model
        self._most_read = most_read
        self._data: dict[Page, bytes] = {}
        self._read_s: dict[Page, float] = {}
        self._damaged: list[tuple[Page, HearthError]] = []
        self._under_way = deque[tuple[Loaded, float]]()

    def take(self, match: Match) -> Match:
        """Return the part of a match to load, whose pages have to be held until it is loaded."""
        self._take_note()
        wanted = match.cut(self._cost_model.tokens(match))
        self.skipped += match.tokens - wanted.tokens
        for number, page in enumerate(wanted.pages):
            if page.place is None and page not in self._data and not self._read(page):
                return wanted.cut(number * PAGE_TOKENS)
        return wanted

    def take_damaged(self) -> list[tuple[Page, HearthError]]:
        """Take the pages whose files gave an error since the last call."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def load(self, match: Match, row: int, filled: int, drafted: int) -> None:
        """Copy the taken pages of a match into the first slots of a row."""
        read_s = sum(self._read_s.get(page, 0.0) for page in match.pages)
        for loaded in self._pool.load(match.pages, row, filled, drafted, self._data):
            self._under_way.append((loaded, read_s if loaded.tier == "disk" else 0.0))

    def done(self) -> None:
        """Drop the data of taken pages: all are loaded, or will not be."""
        self._data.clear()
        self._read_s.clear()

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a prefill step of `tokens`, padding included."""
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
