from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hearth.actors.scheduler.request_state import RequestState, RequestStatus
from hearth.actors.settings import PolicySettings, Reloadable

_LESS = 4
_BEGINNING_S = 0.5
MEMORY_S = 60.0
"""Time constant in seconds with which the use of slots is forgotten."""
_FORGOTTEN_S = 0.01


class _Usage:
    """Seconds for which clients have had slots of late; a second `MEMORY_S` ago counts 1/e."""

    def __init__(self) -> None:
        # By client: the seconds that it has used, as of a moment.
        self._used: dict[int, tuple[float, float]] = {}

    def add(self, client: int, placed: float, now: float) -> None:
        """Count a slot that the client had from `placed` until `now`."""
        self._used[client] = (self.of(client, now) + _held(placed, now), now)

    def of(self, client: int, now: float) -> float:
        """Seconds that the client has used, without the slots that it has now."""
        seconds, then = self._used.get(client, (0.0, now))
        return seconds * math.exp((then - now) / MEMORY_S)

    def forget(self, now: float) -> None:
        """Remove the clients that have used nothing of late."""
        for client in [one for one in self._used if self.of(one, now) < _FORGOTTEN_S]:
            del self._used[client]


def _held(placed: float, now: float) -> float:
    """Seconds that count of a slot held from `placed` until `now`."""
    return -MEMORY_S * math.expm1((placed - now) / MEMORY_S)


class RunningSet:
    """The requests at the executor, with slots and without; no clock, no I/O.

    A row stays until an output says that it ended or left, or the executor has died.
    """

    def __init__(self, settings: Reloadable[PolicySettings]) -> None:
        self._settings = settings
        self._ageing_s = settings.current.ageing_s
        self._rows: dict[int, RequestState] = {}
        self._usage = _Usage()
        self.slots = 0
        # The request of a claim, until it has been offered.
        self.claimant: RequestState | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._rows.values())

    @property
    def closed(self) -> bool:
        """True if a row is held that runs alone."""
        return len(self._rows) == 1 and next(iter(self)).alone

    @property
    def offered(self) -> list[RequestState]:
        """The rows that the executor will place, in its order."""
        waiting = [row for row in self if row.status is RequestStatus.OFFERED]
        return sorted(waiting, key=lambda row: row.order)

    @property
    def staying(self) -> list[RequestState]:
        """The placed rows that are not to leave."""
        return [row for row in self if row.status is RequestStatus.RUNNING]

    @property
    def waiting(self) -> list[RequestState]:
        """The offered rows for which there is no slot yet: they count as waiting."""
        behind = sum(not row.ends for row in self) - self.slots
        return self.offered[-behind:] if behind > 0 else []

    @property
    def unplaced(self) -> int:
        """Number of rows without a slot, including withdrawn rows that have not left yet."""
        return sum(not row.has_slot for row in self)

    @property
    def running(self) -> int:
        """Number of slots taken by requests that go on."""
        running = sum(row.has_slot and not row.ends for row in self)
        # A slot is reused while the last token of its row is still on its way.
        return min(running, self.slots)

    def next_of(
        self, heads: Sequence[tuple[float, RequestState]], now: float
    ) -> tuple[float, float, RequestState] | None:
        """The next request to offer, of the first ones of clients: its order, its arrival, itself.

        The `claimant`, if it is among the heads, is the next. Else it is the request that came
        first; but a client that has had much less slot time than another goes before that client,
        until it has as many slots.
        """
        if not heads:
            return None
        shares = _Shares(self, now)
        offered = self.offered
        ranked = []
        for place, (arrival, entry) in enumerate(heads):
            # A request behind the first of the heads comes before others in its turn.
            passed = [row.order for row in offered if shares.passes(entry, row)]
            if place and shares.passes(entry, heads[0][1]):
                passed.append(heads[0][0])
            order = min([arrival, *(math.nextafter(one, -math.inf) for one in passed)])
            own = [row for row in offered if row.client == entry.client]
            order = max([order, *(row.order for row in own if row.arrival <= arrival)])
            if entry is self.claimant:
                order = -math.inf
            ranked.append((order, arrival, place, entry))
        order, arrival, _, entry = min(ranked)
        return order, arrival, entry

    def used(self, client: int, now: float) -> float:
        """Seconds of late for which a client has had slots."""
        own = [row.placed_at for row in self if row.client == client]
        return self._usage.of(client, now) + sum(_held(one, now) for one in own if one is not None)

    def add(self, row: RequestState) -> None:
        """Add a row that has been offered."""
        self._rows[row.rid] = row
        if row is self.claimant:
            self.claimant = None

    def get(self, rid: int) -> RequestState | None:
        """The row of a request, if it is held."""
        return self._rows.get(rid)

    def remove(self, rid: int, now: float) -> None:
        """Remove a row that has left."""
        row = self._rows.pop(rid)
        if row.placed_at is not None:
            self._usage.add(row.client, row.placed_at, now)
            self._usage.forget(now)

    def clear(self) -> list[RequestState]:
        """Remove all rows, and return them."""
        rows, self._rows = list(self), {}
        return rows

    def next_in(self) -> RequestState | None:
        """The first offered row for which no slot is free or about to be; None if none is."""
        placed = [row for row in self if row.has_slot]
        if len(placed) < self.slots:
            return None
        ahead = sum(row.status is not RequestStatus.RUNNING for row in placed)
        return next(iter(self.offered[ahead:]), None)

    def behind(self, held: RequestState) -> float:
        """Time of arrival with which a row is queued once preempted for the first that waits.

        That is right behind a higher priority; else it has had its time, and goes behind all.
        """
        first = self.next_in()
        if first is None or first.priority <= held.priority:
            return math.inf
        return first.arrival + held.priority * self._ageing_s

    def release_times(
        self, arrival: float, priority: int, most_s: float = math.inf
    ) -> list[tuple[float, RequestState]]:
        """Times at which each placed row is preempted for a request of this arrival and priority.

        A row holds its slot for `hold_s`, and `most_s` at most, unless the request has a higher
        priority, and until the row would be queued behind the request. A prefilling row would not
        leave soon: it is chosen only if all rows prefill.
        """
        times, hold_s = [], min(self._settings.current.hold_s, most_s)
        for held in [row for row in self.staying if row.first_token_at is not None] or self.staying:
            behind = arrival + held.priority * self._ageing_s
            limit = (held.placed_at or 0.0) + hold_s
            times.append((behind if priority > held.priority else max(behind, limit), held))
        return times

    def batch_release_times(self, order: float) -> list[tuple[float, RequestState]]:
        """Times at which the rows of a synchronous batch are preempted for a waiting request."""
        staying = self.staying
        if not staying:
            return []
        due = min(held.placed_at or 0.0 for held in staying)
        due += self._settings.current.hold_s
        if len(staying) == self.slots:
            # A full batch goes on until its lowest row would be queued behind the other.
            due = max(due, order + min(held.priority for held in staying) * self._ageing_s)
        return [(due, held) for held in staying]


class _Shares:
    """Slots of clients, now and of late, for one decision."""

    def __init__(self, running: RunningSet, now: float) -> None:
        placed = [row for row in running if row.has_slot]
        self._has = Counter(row.client for row in placed or running)
        self._offered = Counter(row.client for row in running if not row.has_slot and placed)
        self._running, self._now = running, now
        self._used: dict[int, float] = {}

    def passes(self, entry: RequestState, other: RequestState) -> bool:
        """True if `entry` goes before `other`: its client has fewer slots and has had much less."""
        one, two = entry.client, other.client
        # As offered rows get slots the other client loses as many.
        soon = self._offered[one] + 1
        return (
            one != two
            and entry.priority >= other.priority
            and self._has[one] + soon <= self._has[two] - soon + 1
            and much_less(self._of(one), self._of(two))
        )

    def _of(self, client: int) -> float:
        if client not in self._used:
            self._used[client] = self._running.used(client, self._now)
        return self._used[client]


def much_less(used: float, other: float) -> bool:
    """True if a client has had slots for less than a quarter of another's time.

    It is False for two clients that have only just begun.
    """
    return _LESS * (used + _BEGINNING_S) < other


def withdraw(rows: Iterable[RequestState]) -> None:
    """Take back the offers of rows, unless these have slots by then."""
    for row in rows:
        row.set_status(RequestStatus.WITHDRAWING)
