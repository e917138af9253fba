from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from actors.house import HeldRow, House
from actors.waiting_queue import Entry, WaitingQueue


class Claim(NamedTuple):
    """A request that is to have a place by `due`, and the rows of which one, or all, give way."""

    due: float
    entry: Entry
    rows: list[HeldRow]


class FirstPlaces:
    """Whoever asks for less than another has one place within the hold limit; no clock, no I/O.

    A client without a place, whose first request has waited for `hold_s`, gets one of a client
    that asks for more, whatever that has paid for it and whatever its priority. That client keeps
    another place, or has not given way with this request before: so it gets further too. Requests
    of a priority below 0 have said that they can wait. A synchronous batch gives way as a whole,
    unless one of its requests has before.
    """

    def __init__(
        self, house: House, queue: WaitingQueue, hold_s: float, *, synchronous: bool
    ) -> None:
        self._house, self._queue, self._hold_s = house, queue, hold_s
        self._synchronous = synchronous

    def next(self) -> Claim | None:
        """The claim that is due first; None while there is none, or one is being answered."""
        house = self._house
        placed = [row for row in house if row.placed is not None]
        if not placed or any(row.asked == "give way" for row in placed):
            return None
        if len(placed) < house.places and not self._synchronous:
            return None
        held = Counter(row.client for row in placed)
        asked = Counter(row.client for row in house)
        claims = []
        for entry in self._first_of_each():
            if held[entry.client] or entry.priority < 0:
                continue
            own = asked[entry.client] + self._queue.count_of(entry.client)
            rows = [
                row
                for row in placed
                if row.asked in {"", "release"}
                and (held[row.client] > 1 or not row.entry.gave_way)
                and asked[row.client] + self._queue.count_of(row.client) > own
            ]
            if rows and self._synchronous:
                rows = [] if any(row.entry.gave_way for row in placed) else placed
            if rows:
                claims.append(Claim(entry.queued + self._hold_s, entry, rows))
        return min(claims, key=lambda claim: claim.due, default=None)

    def _first_of_each(self) -> Iterator[Entry]:
        seen = set()
        waiting = [row for row in self._house if row.placed is None]
        for row in sorted(waiting, key=lambda one: one.order):
            if row.client not in seen:
                seen.add(row.client)
                if not row.asked:
                    yield row.entry
        yield from (entry for _, entry in self._queue.heads if entry.client not in seen)
