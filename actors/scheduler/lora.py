from __future__ import annotations

import math
from collections.abc import Iterator

from hearth.actors.scheduler.request_state import RequestState, RequestStatus
from hearth.actors.scheduler.running_set import RunningSet, withdraw
from hearth.actors.scheduler.waiting_queue import WaitingQueue
from hearth.actors.settings import PolicySettings, Reloadable

_TIMES_PAID = 4
"""Shortest turn, in multiples of the time until its first token."""
_PAID_S = 2.0
"""Bound in seconds of the shortest turn."""


class LoRAScheduler:
    """Choice of the active LoRA adapter, which all rows that run together share; no clock, no I/O.

    Only rows of the active adapter are offered, and rows of other adapters are preempted. While
    requests wait for other adapters, a turn lasts, from its first slot on, for `adapter_turn_s`
    times the share of slots that its rows have, so that few rows do not keep many waiting; but for
    at least `_TIMES_PAID` times its first prefill, up to `_PAID_S`. Then its rows are preempted and
    keep their order in the queue, and the adapter of the first waiting request follows. A request
    counts as waiting since its adapter's last turn at the earliest: so each adapter gets a turn,
    however many requests others have. A turn goes on while one of its rows is by priority before
    all requests that wait for other adapters; after its time only requests before those join it.
    With synchronous batches a turn is a batch.
    """

    def __init__(
        self, running: RunningSet, queue: WaitingQueue, settings: Reloadable[PolicySettings]
    ) -> None:
        self._running, self._queue, self._settings = running, queue, settings
        self._ageing_s = settings.current.ageing_s
        self._active = ""
        # Times of the turn's first slot and of its first token.
        self._placed_at = self._first_token_at = math.inf
        # True once its time is over, and only priority prolongs it.
        self._late = False
        self._ended: dict[str, float] = {}

    @property
    def others_wait(self) -> bool:
        """True if requests wait for another adapter than the active one."""
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
        """The request whose adapter is served once no row is left; None if no request waits."""
        if len(self._queue.adapters) <= 1:
            return self._queue.first
        return min(self._ranked(), key=lambda one: one[0])[1]

    @property
    def due(self) -> float:
        """Time at which the turn is over; infinite while no request waits for another adapter."""
        # The chosen adapter has a slot before another one is chosen.
        unplaced = self._placed_at == math.inf
        if unplaced or self._settings.current.synchronous or not self.others_wait:
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
        """Choose the next adapter, when no row is left."""
        if (first := self.next) is not None:
            self._active = first.adapter

    def note_placed(self, row: RequestState, now: float) -> None:
        """Record that a row has got a slot."""
        if row.adapter == self._active:
            self._placed_at = min(self._placed_at, now)

    def note_first_token(self, row: RequestState, now: float) -> None:
        """Record that a row has its first token."""
        if row.adapter == self._active:
            self._first_token_at = min(self._first_token_at, now)

    def emptied(self, now: float) -> None:
        """End the turn, when no row is left."""
        self._end(now)

    def tick(self, now: float) -> None:
        """Preempt all rows whose turn is over: rows of the next adapter are offered meanwhile."""
        self._late = not self._settings.current.synchronous and now >= self._limit
        if self.due <= now:
            _, first = min(self._rivals(), key=lambda one: one[0])
            self._end(now)
            self._active = first.adapter
        withdraw(row for row in self._running.offered if row.adapter != self._active)
        # One may have got its slot just before that.
        for row in [row for row in self._running.staying if row.adapter != self._active]:
            row.set_status(RequestStatus.PREEMPTING)
            row.behind = -math.inf

    def _end(self, now: float) -> None:
        self._ended[self._active] = now
        self._placed_at = self._first_token_at = math.inf
        self._late = False

    @property
    def _own(self) -> list[RequestState]:
        """The rows that have the active adapter."""
        return [row for row in self._running if row.adapter == self._active]

    @property
    def _limit(self) -> float:
        """Time at which the turn ends among equal priorities."""
        if self._placed_at == math.inf:
            return math.inf
        taken = sum(row.has_slot for row in self._own) / self._running.slots
        paid = min(_TIMES_PAID * (self._first_token_at - self._placed_at), _PAID_S)
        return self._placed_at + max(taken * self._settings.current.adapter_turn_s, paid)

    def _rivals(self) -> Iterator[tuple[float, RequestState]]:
        """The first requests of clients for other adapters, each with its rank."""
        return (one for one in self._ranked() if one[1].adapter != self._active)

    def _ranked(self) -> Iterator[tuple[float, RequestState]]:
        for arrival, entry in self._queue.heads:
            ahead = entry.priority * self._ageing_s
            ended = self._ended.get(entry.adapter, -math.inf)
            yield max(arrival + ahead, ended) - ahead, entry
