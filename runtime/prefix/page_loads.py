"""What of the pages that are known is loaded, and what that took."""

import time
from collections import deque

from runtime.errors import HearthError
from runtime.prefix.disk_tier import DiskTier
from runtime.prefix.identities import PAGE_TOKENS
from runtime.prefix.page_pool import Loaded, PagePool
from runtime.prefix.pages import Match, Page
from runtime.prefix.worth import Worth


class PageLoads:
    """Loads pages where that takes less than computing them, from memory or from files.

    Files are read where it is decided, and checked, so what is taken is there when rows have their
    places: `most_read` pages at a time at the most.
    """

    def __init__(self, pool: PagePool, disk: DiskTier | None, worth: Worth, most_read: int) -> None:
        self.skipped = 0
        """Tokens that were there and are computed all the same, as loading takes longer."""
        self._pool, self._disk, self._worth = pool, disk, worth
        self._most_read = most_read
        self._data: dict[Page, bytes] = {}
        self._read_s: dict[Page, float] = {}
        self._damaged: list[tuple[Page, HearthError]] = []
        self._under_way = deque[tuple[Loaded, float]]()

    def take(self, match: Match) -> Match:
        """What of a match to load; that has to be held until it is loaded."""
        self._take_note()
        wanted = match.cut(self._worth.tokens(match))
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
        self._worth.record_computed(tokens, seconds)

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
            self._worth.record_loaded(loaded.tier, loaded.tokens, seconds + read_s)
