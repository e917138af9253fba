from __future__ import annotations

from hearth.actors.adapter_turns import AdapterTurns
from hearth.actors.executor_messages import Offer, Offered, Revoke
from hearth.actors.fill_wait import FillWait
from hearth.actors.house import HeldRow, House, revoke
from hearth.actors.settings import PolicySettings, Reloadable
from hearth.actors.suspects import Suspects
from hearth.actors.waiting_queue import WaitingQueue


class Offers:
    """Which rows an executor is offered, and when an idle one begins; no clock, no I/O."""

    def __init__(
        self,
        house: House,
        queue: WaitingQueue,
        suspects: Suspects,
        turns: AdapterTurns,
        settings: Reloadable[PolicySettings],
    ) -> None:
        self._house, self._queue, self._suspects, self._turns = house, queue, suspects, turns
        self._settings = settings
        self._fill_wait = FillWait(settings)
        self._incarnation = 0
        # Since when an executor works, and since when an idle one could wait for company.
        self._begun: float | None = None
        self._fill_from = 0.0

    def arrived(self, now: float) -> None:
        """A request has been admitted."""
        self._fill_wait.arrived(now)

    def executor_ready(self, incarnation: int, now: float) -> None:
        """An executor waits for rows."""
        self._incarnation, self._fill_from = incarnation, now

    def executor_retires(self) -> None:
        """There will be another one, which is to be offered what waits."""
        self._incarnation = 0

    def executor_lost(self, now: float) -> None:
        """There is none until the next one is ready."""
        self._incarnation, self._begun = 0, None
        self._turns.emptied(now)

    def note_idle(self, now: float, *, waited: bool = False) -> None:
        """Rows have left: where none is held any more, wait for company unless some `waited`."""
        if self._begun is not None and not self._house:
            self._fill_wait.ended(now - self._begun)
            self._begun = None
            # Who waited for their adapter's turn have waited long enough.
            waited |= self._turns.others_wait
            self._fill_from = now - self._settings.current.fill_wait_s if waited else now
            self._turns.emptied(now)

    def start_time(self) -> float | None:
        """When an idle executor is offered rows; None while it works, or nobody waits."""
        opened, first = self._opened(), self._turns.next
        if opened is None or first is None:
            return None
        company = self._queue.adapters[first.adapter]
        full = company >= self._house.places or self._suspects.runs_alone(first)
        return opened if full else opened + self._fill_wait.wait_s

    def next(self, now: float) -> list[Offer | Revoke]:
        """Offer the rows that are next, up to as many as there are places beyond those placed.

        At that bound, one that stands before the last of them goes in its place. As many again may
        be on their way back: a busy executor answers at its next border.
        """
        house, queue, opened = self._house, self._queue, self._opened()
        if opened is None:
            if not self._incarnation or self._settings.current.synchronous:
                return []
        elif (start := self.start_time()) is None or start > now:
            return []
        else:
            self._turns.begin()
        rows: list[HeldRow] = []
        revoked: list[HeldRow] = []
        ahead, room = house.offered, 2 * house.places - house.unplaced
        while len(rows) < room and not house.closed:
            if (found := house.next_of(self._turns.heads, now)) is None:
                break
            order, arrival, first = found
            alone = self._suspects.runs_alone(first)
            if alone and house:
                break
            if len(ahead) + len(rows) >= house.places:
                if not ahead or ahead[-1].order <= order:
                    break
                revoked.append(ahead.pop())
                revoked[-1].asked = "revoke"
            queue.remove(first.rid)
            row = HeldRow(first, self._incarnation, arrival, order, alone)
            house.add(row)
            rows.append(row)
        if opened is not None:
            self._fill_wait.started(opened, len(rows))
            self._begun = now
        offered = [Offered(row.rid, row.entry.to_row(), row.order) for row in rows]
        return [*revoke(revoked), *([Offer(offered)] if offered else [])]

    def _opened(self) -> float | None:
        """Since when an idle executor could begin; None while it works, or nobody waits."""
        if not self._incarnation or self._house or (oldest := self._queue.oldest) is None:
            return None
        return max(oldest, self._fill_from)
