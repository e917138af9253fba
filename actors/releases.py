from __future__ import annotations

from hearth.actors.executor_messages import Release
from hearth.actors.house import HeldRow, House
from hearth.actors.suspects import Suspects
from hearth.actors.waiting_queue import WaitingQueue

ALONE_S = 2.0
"""How long at most others keep their places from a request that runs alone, and it from them."""


class Releases:
    """Which rows give way to those that wait, and from when on; no clock, no I/O.

    In a full house one row after the other gives way to the first that waits. All do so for a
    request that runs alone, and for the next batch where batches are synchronous.
    """

    def __init__(self, house: House, queue: WaitingQueue, suspects: Suspects) -> None:
        self._house, self._queue, self._suspects = house, queue, suspects

    def times(self, *, synchronous: bool) -> list[float]:
        """From when on each row gives way, of those that may."""
        clearing = self._clearing_times(synchronous=synchronous)
        return [time for time, _ in (*clearing, *self._yielding_times(synchronous=synchronous))]

    def due(self, now: float, *, synchronous: bool) -> list[Release]:
        """Ask those to leave whose time has come."""
        times = self._clearing_times(synchronous=synchronous)
        due = [row for time, row in times if time <= now]
        for row in due:
            row.asked = "release"
        # One after the other: the next one gives way to the next that waits.
        while ready := [
            row for time, row in self._yielding_times(synchronous=synchronous) if time <= now
        ]:
            # Who has not paid stays until it has, so it would give way for nobody yet.
            row = min(ready, key=lambda one: (max(one.paid, now), one.priority, one.placed or 0.0))
            row.behind = self._house.behind(row)
            row.asked = "release"
            due.append(row)
        return [Release([row.rid for row in due])] if due else []

    def _clearing_times(self, *, synchronous: bool) -> list[tuple[float, HeldRow]]:
        """From when on rows leave so that the house empties: for a suspect, or the next batch."""
        first, house = self._queue.first, self._house
        if first is None:
            return []
        if synchronous:
            return house.batch_release_times(self._queue.order)
        if house.closed or self._suspects.runs_alone(first):
            return house.release_times(
                self._queue.order, first.priority, min(house.hold_s, ALONE_S)
            )
        return []

    def _yielding_times(self, *, synchronous: bool) -> list[tuple[float, HeldRow]]:
        """From when on a row gives way to the first that waits, where the house is full."""
        first = None if synchronous else self._house.next_in()
        if first is None:
            return []
        return self._house.release_times(first.arrival, first.priority, self._house.hold_s)
