from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from hearth.actors.scheduler.lora import LoRAScheduler
from hearth.actors.scheduler.request_state import RequestState, RequestStatus
from hearth.actors.scheduler.running_set import RunningSet, much_less, withdraw
from hearth.actors.scheduler.waiting_queue import WaitingQueue

FIRST_PLACE_S = 1.5
"""Seconds that a client which asks for less than another waits for a slot; prefill follows."""
_AT_ONCE = RequestStatus.PREEMPTING_AT_ONCE
_STAYING = {RequestStatus.RUNNING, RequestStatus.PREEMPTING}


class FairShareClaim(NamedTuple):
    """A request that is to get a slot by `due`, and the rows that may leave for it, one or all."""

    due: float
    entry: RequestState
    rows: list[RequestState]
    all_give_way: bool


class FairShare:
    """Bound of the wait of light clients for their first slot; no clock, no I/O.

    A light client has no slot, has fewer requests than another client, and has had slots for much
    less time of late. Once its first request has waited for `FIRST_PLACE_S`, a row of the other
    client gives way, of any priority and whether it has paid or not. That client must keep another
    slot, or the row must not have given way unpaid before: so the other client makes progress too.
    Requests of a priority below 0 make no claim. A synchronous batch is preempted as a whole, once
    all of its rows that gave way before have paid. Requests for another adapter wait for its turn.
    """

    def __init__(self, running: RunningSet, queue: WaitingQueue, lora: LoRAScheduler) -> None:
        self._running, self._queue, self._lora = running, queue, lora

    def next(self, now: float, *, synchronous: bool) -> FairShareClaim | None:
        """The claim that is due first; None without a claim, or while one is being served."""
        running = self._running
        placed = [row for row in running if row.has_slot]
        if not placed or any(row.status is _AT_ONCE for row in placed):
            return None
        if len(placed) < running.slots and not synchronous:
            return None
        held = Counter(row.client for row in placed)
        asked = Counter(row.client for row in running)
        # Time from which each row may be preempted: one that gave way before has to pay first.
        loose = {
            row.rid: row.paid if row.gave_way and (synchronous or held[row.client] == 1) else 0.0
            for row in placed
        }
        if synchronous:
            loose = dict.fromkeys(loose, max(loose.values()))

        def total(client: int) -> int:
            return asked[client] + self._queue.count_of(client)

        rows = [row for row in placed if row.status in _STAYING and loose[row.rid] < math.inf]
        used = {client: running.used(client, now) for client in held}

        def may_ask(client: int) -> list[RequestState]:
            """Rows of clients that ask for more, and have had much more."""
            own, had = total(client), running.used(client, now)
            return [
                row for row in rows if total(row.client) > own and much_less(had, used[row.client])
            ]

        waiting = [
            (max(entry.queued, entry.preempted_at), place, entry, others)
            for place, entry in enumerate(self._first_of_each())
            if not held[entry.client] and entry.priority >= 0 and (others := may_ask(entry.client))
        ]
        if not waiting:
            return None
        since, _, first, rows = min(waiting)
        due = max(since + FIRST_PLACE_S, min(loose[row.rid] for row in rows))
        if synchronous:
            return FairShareClaim(due, first, placed, all_give_way=True)
        return FairShareClaim(
            due, first, [row for row in rows if loose[row.rid] <= due], all_give_way=False
        )

    def preempt_for(self, claim: FairShareClaim) -> None:
        """Preempt rows for a claim that is due, once its request is offered before all others."""
        leaving = claim.rows
        if not claim.all_give_way:
            row = self._running.get(claim.entry.rid)
            ahead = self._running.offered[:1]
            if row is None and not (ahead and ahead[0].order == -math.inf):
                return
            # Without a row, the one that was offered so before gets the slot.
            if row is not None and row.order > -math.inf:
                # It comes back, and is then offered before all others.
                withdraw([row])
                return
            # The newest has the least to lose, and one that is about to go anyway loses nothing.
            going = RequestStatus.PREEMPTING
            leaving = [max(leaving, key=lambda one: (one.status is going, one.placed_at or 0.0))]
        for row in [one for one in leaving if not one.ends]:
            row.set_status(_AT_ONCE)
            # Another of its client is prefilled meanwhile, which may be preempted as well.
            unpaid = row.paid > claim.due
            row.behind = math.inf if unpaid else -math.inf
            row.gave_way |= unpaid

    def _first_of_each(self) -> Iterator[RequestState]:
        seen = set()
        waiting = [row for row in self._running if not row.has_slot]
        for row in sorted(waiting, key=lambda one: one.order):
            if row.client not in seen:
                seen.add(row.client)
                if row.status is RequestStatus.OFFERED:
                    yield row
        yield from (entry for _, entry in self._lora.heads if entry.client not in seen)
