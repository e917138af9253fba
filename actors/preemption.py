from __future__ import annotations

from hearth.actors.quarantine import Quarantine
from hearth.actors.request_state import RequestState, RequestStatus
from hearth.actors.running_set import RunningSet
from hearth.actors.waiting_queue import WaitingQueue

ALONE_S = 2.0
"""How long at most others keep their places from a request that runs alone, and it from them."""


class Preemption:
    """Choice of the rows that give way to those that wait, and when; no clock, no I/O.

    Where all places are taken one row after the other gives way to the first that waits. All do so
    for a request that runs alone, and for the next batch where batches are synchronous.
    """

    def __init__(self, running: RunningSet, queue: WaitingQueue, quarantine: Quarantine) -> None:
        self._running, self._queue, self._quarantine = running, queue, quarantine

    def times(self, *, synchronous: bool) -> list[float]:
        """From when on each row gives way, of those that may."""
        clearing = self._clearing_times(synchronous=synchronous)
        return [time for time, _ in (*clearing, *self._yielding_times(synchronous=synchronous))]

    def act(self, now: float, *, synchronous: bool) -> None:
        """Ask those to leave whose time has come."""
        times = self._clearing_times(synchronous=synchronous)
        for row in [row for time, row in times if time <= now]:
            row.turn(RequestStatus.PREEMPTING)
        # One after the other: the next one gives way to the next that waits.
        while ready := [
            row for time, row in self._yielding_times(synchronous=synchronous) if time <= now
        ]:
            # Who has not paid stays until it has, so it would give way for nobody yet.
            row = min(ready, key=lambda one: (max(one.paid, now), one.priority, one.placed or 0.0))
            row.behind = self._running.behind(row)
            row.turn(RequestStatus.PREEMPTING)

    def _clearing_times(self, *, synchronous: bool) -> list[tuple[float, RequestState]]:
        """From when on rows leave so that all places are free: for a suspect, or the next batch."""
        first, running = self._queue.first, self._running
        if first is None:
            return []
        if synchronous:
            return running.batch_release_times(self._queue.order)
        if running.closed or self._quarantine.runs_alone(first):
            return running.release_times(
                self._queue.order, first.priority, min(running.hold_s, ALONE_S)
            )
        return []

    def _yielding_times(self, *, synchronous: bool) -> list[tuple[float, RequestState]]:
        """From when on a row gives way to the first that waits, where all places are taken."""
        first = None if synchronous else self._running.next_in()
        if first is None:
            return []
        return self._running.release_times(first.arrival, first.priority, self._running.hold_s)
