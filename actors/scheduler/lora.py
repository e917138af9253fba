from __future__ import annotations

import math
from collections.abc import Iterator

from hearth.actors.scheduler.request_state import RequestState, RequestStatus
from hearth.actors.scheduler.running_set import RunningSet, withdraw
from hearth.actors.scheduler.waiting_queue import WaitingQueue
from hearth.actors.settings import PolicySettings, Reloadable

_TIMES_PAID = 4
"""How long a turn lasts at least, in the time that it took until its first token."""
_PAID_S = 2.0
"""How long it lasts at least, however long that took."""


class LoRAScheduler:
    """Whose adapter is served: rows that run together share one; no clock, no I/O.

    Only rows of that adapter are lined up, and of others none stay. Where requests
    wait for another, its turn lasts from its first place on for that share of `adapter_turn_s` of
    which places are taken, so that few rows do not keep many waiting; and for long enough to be
    worth the prompts that it had to compute again, up to two seconds. Then its rows give way and
    stand where they stood, and the adapter follows whose first request stands first, which counts
    as waiting since its adapter's last turn at the earliest: so each has its turn however many
    requests others have. A turn goes on while one of its rows stands before all who wait for others
    by priority; beyond its time only those join it who stand before them as well. In synchronous
    batches a turn is a batch.
    """

    def __init__(
        self, running: RunningSet, queue: WaitingQueue, settings: Reloadable[PolicySettings]
    ) -> None:
        self._running, self._queue, self._settings = running, queue, settings
        self._ageing_s = settings.current.ageing_s
        self._active = ""
        # When the turn had its first place and its first token.
        self._placed = self._begun = math.inf
        # Whether its time is over, and only priority prolongs it.
        self._late = False
        self._ended: dict[str, float] = {}

    @property
    def others_wait(self) -> bool:
        """Whether requests wait for another adapter than the one that is served."""
        waiting = self._queue.adapters
        return len(waiting) > (self._active in waiting)

    @property
    def heads(self) -> list[tuple[float, RequestState]]:
        """The first request of each client that may join, with its virtual arrival, in order."""
        heads = self._queue.heads
        if not self.others_wait:
            return heads
        before = min(order for order, _ in self._rivals()) if self._late else math.inf
        return [one for one in heads if one[1].adapter == self._active and one[0] <= before]

    @property
    def next(self) -> RequestState | None:
        """The request whose adapter is served once no row is left; None where none waits."""
        if len(self._queue.adapters) <= 1:
            return self._queue.first
        return min(self._ranked(), key=lambda one: one[0])[1]

    @property
    def due(self) -> float:
        """When the turn is over; infinite while nobody waits for another adapter."""
        # Whoever was chosen has a place before another is.
        if self._placed == math.inf or self._settings.current.synchronous or not self.others_wait:
            return math.inf
        held = [one for one in self._own if not one.ends]
        if not held:
            return math.inf
        highest, limit = max(one.priority for one in held), self._limit
        return min(
            max(order + highest * self._ageing_s, -math.inf if rival.priority > highest else limit)
            for order, rival in self._rivals()
        )

    def begin(self) -> None:
        """Serve the next adapter: no row is left."""
        if (first := self.next) is not None:
            self._active = first.adapter

    def placed(self, row: RequestState, now: float) -> None:
        """A row has a place."""
        if row.adapter == self._active:
            self._placed = min(self._placed, now)

    def begun(self, row: RequestState, now: float) -> None:
        """A row has its first token."""
        if row.adapter == self._active:
            self._begun = min(self._begun, now)

    def emptied(self, now: float) -> None:
        """End the turn: no row is left."""
        self._end(now)

    def tick(self, now: float) -> None:
        """Let all rows give way whose turn is over: those of the next are lined up meanwhile."""
        self._late = not self._settings.current.synchronous and now >= self._limit
        if self.due <= now:
            _, first = min(self._rivals(), key=lambda one: one[0])
            self._end(now)
            self._active = first.adapter
        withdraw(row for row in self._running.scheduled if row.adapter != self._active)
        # One may have got its place just before that.
        for row in [row for row in self._running.staying if row.adapter != self._active]:
            row.turn(RequestStatus.PREEMPTING)
            row.behind = -math.inf

    def _end(self, now: float) -> None:
        self._ended[self._active] = now
        self._placed = self._begun = math.inf
        self._late = False

    @property
    def _own(self) -> list[RequestState]:
        """The rows that have the adapter whose turn it is."""
        return [row for row in self._running if row.adapter == self._active]

    @property
    def _limit(self) -> float:
        """How long the turn lasts among equals."""
        if self._placed == math.inf:
            return math.inf
        taken = sum(row.has_slot for row in self._own) / self._running.slots
        paid = min(_TIMES_PAID * (self._begun - self._placed), _PAID_S)
        return self._placed + max(taken * self._settings.current.adapter_turn_s, paid)

    def _rivals(self) -> Iterator[tuple[float, RequestState]]:
        """The first requests of clients for other adapters, with what ranks these."""
        return (one for one in self._ranked() if one[1].adapter != self._active)

    def _ranked(self) -> Iterator[tuple[float, RequestState]]:
        for arrival, entry in self._queue.heads:
            ahead = entry.priority * self._ageing_s
            ended = self._ended.get(entry.adapter, -math.inf)
            yield max(arrival + ahead, ended) - ahead, entry
