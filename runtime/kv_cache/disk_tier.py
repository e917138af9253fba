"""Pages of the prefix cache on their way between memory and files."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hearth.runtime.device.device import Span
from hearth.runtime.kv_cache.disk_cache import DiskCache
from hearth.runtime.kv_cache.page_pool import STAGED, PagePool
from hearth.runtime.kv_cache.pages import Change, Erase, Page, Place, Write

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
        """Queue the page at `source` for writing; lost where others wait longer than `within_s`."""
        self.turn(within_s)
        if not self._free:
            self._lost.append(page)
            return
        number = self._free.pop()
        span = self._pool.stage(source, number)
        # The page may get or lose a draft's state before that has ended.
        self._leaving.append(_Leaving(page, number, span, page.draft))
        self.turn(within_s)

    def turn(self, within_s: float = 0.0) -> None:
        """Hand pages over that the device has copied meanwhile."""
        while self._leaving and self._leaving[0].span.seconds is not None:
            one = self._leaving.popleft()
            if one.page is not None:
                data = self._pool.staged(one.number)
                if not self.disk_cache.write(one.page, data, within_s, draft=one.draft):
                    self._lost.append(one.page)
            self._free.append(one.number)

    def read(self, page: Page) -> bytes | None:
        """Return the bytes of a page, None while it is on its way there; raises `spill_invalid`."""
        self.turn()
        if any(leaving.page is page for leaving in self._leaving):
            return None
        return self.disk_cache.read(page)

    def erase(self, name: bytes) -> None:
        """Remove a page from the disk, or from the way there."""
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
        self.turn(_left(until))
        while len(self._leaving) > most and _left(until):
            time.sleep(_TURN_S)
            self.turn(_left(until))


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())
