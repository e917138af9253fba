from __future__ import annotations

from hearth.actors.scheduler.lora import LoRAScheduler
from hearth.actors.scheduler.quarantine import Quarantine
from hearth.actors.scheduler.running_set import RunningSet, withdraw
from hearth.actors.scheduler.waiting_queue import WaitingQueue
from hearth.actors.settings import PolicySettings, Reloadable

_MEMORY = 32
"""Number of windows and batches over which the means are taken, exponentially."""


class BatchingDelay:
    """Choice of the time that an idle executor waits for more rows; no clock, no I/O.

    A window opens when a request could start, and lasts `fill_wait_s`. Waiting costs the first
    request that time. Not waiting costs the requests that come within the window a whole batch,
    but `hold_s` at most. So waiting pays if the share of windows in which more requests come, times
    the mean length of a batch, is more than `fill_wait_s`. The first estimates are that more
    requests come in every window, and that a batch takes `hold_s`. A batch lasts from one idle
    moment to the next; rows that join it lose less, a step and a prefill of their own.
    """

    def __init__(self, settings: Reloadable[PolicySettings]) -> None:
        self._settings = settings
        self._share = 1.0
        self._batch_s = settings.current.hold_s
        self._closes: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds to wait for more rows."""
        wait_s = self._settings.current.fill_wait_s
        return wait_s if self._share * self._batch_s > wait_s else 0.0

    def started(self, opened: float, rows: int) -> None:
        """Record a batch of `rows` rows from the window that opened at `opened`."""
        self._settle()
        self._closes = opened + self._settings.current.fill_wait_s
        if rows > 1:
            self._note(others_came=True)

    def arrived(self, now: float) -> None:
        """Record that a request has come."""
        if self._closes is not None and now <= self._closes:
            self._note(others_came=True)

    def ended(self, seconds: float) -> None:
        """Record that a batch ended after `seconds`."""
        self._batch_s += (min(seconds, self._settings.current.hold_s) - self._batch_s) / _MEMORY

    def _settle(self) -> None:
        # No request came in the window that is open, if one is.
        if self._closes is not None:
            self._note(others_came=False)

    def _note(self, *, others_came: bool) -> None:
        self._share += (others_came - self._share) / _MEMORY
        self._closes = None


class Offers:
    """Choice of the rows to offer to the executor, and of the time to start an idle one; no I/O."""

    def __init__(
        self,
        running: RunningSet,
        queue: WaitingQueue,
        quarantine: Quarantine,
        lora: LoRAScheduler,
        settings: Reloadable[PolicySettings],
    ) -> None:
        self._running, self._queue, self._quarantine = running, queue, quarantine
        self._lora, self._settings = lora, settings
        self._delay = BatchingDelay(settings)
        # True while there is an executor that takes rows.
        self._open = False
        # Times since which an executor works, and an idle one could wait for more rows.
        self._begun: float | None = None
        self._fill_from = 0.0

    def arrived(self, now: float) -> None:
        """Record that a request has been admitted."""
        self._delay.arrived(now)

    def executor_ready(self, now: float) -> None:
        """Offer rows from now on: an executor waits for them."""
        self._open, self._fill_from = True, now

    def executor_retires(self) -> None:
        """Offer no rows to an executor that retires; they wait for the next one."""
        self._open = False

    def executor_lost(self, now: float) -> None:
        """Offer no rows until the next executor is ready."""
        self._open, self._begun = False, None
        self._lora.emptied(now)

    def note_idle(self, now: float, *, waited: bool = False) -> None:
        """Record that rows have left; if none is held, wait for more rows unless some `waited`."""
        if self._begun is not None and not self._running:
            self._delay.ended(now - self._begun)
            self._begun = None
            # Requests that waited for their adapter's turn have waited long enough.
            waited |= self._lora.others_wait
            self._fill_from = now - self._settings.current.fill_wait_s if waited else now
            self._lora.emptied(now)

    def start_time(self) -> float | None:
        """Time at which an idle executor gets rows; None while it works, or no request waits."""
        opened, first = self._opened(), self._lora.next
        if opened is None or first is None:
            return None
        company = self._queue.adapters[first.adapter]
        full = company >= self._running.slots or self._quarantine.runs_alone(first)
        return opened if full else opened + self._delay.wait_s

    def fill(self, now: float) -> None:
        """Offer the rows that are next, as many as there are slots beyond the placed rows.

        At that bound, a row ordered before the last offered one replaces it. As many rows again may
        be on their way back: a busy executor answers at its next step.
        """
        running, queue, opened = self._running, self._queue, self._opened()
        if opened is None:
            if not self._open or self._settings.current.synchronous:
                return
        elif (start := self.start_time()) is None or start > now:
            return
        else:
            self._lora.begin()
        added = 0
        ahead, room = running.offered, 2 * running.slots - running.unplaced
        while added < room and not running.closed:
            if (found := running.next_of(self._lora.heads, now)) is None:
                break
            order, arrival, first = found
            alone = self._quarantine.runs_alone(first)
            if alone and running:
                break
            if len(ahead) + added >= running.slots:
                if not ahead or ahead[-1].order <= order:
                    break
                withdraw([ahead.pop()])
            queue.remove(first.rid)
            first.offer(arrival, order, alone=alone)
            running.add(first)
            added += 1
        if opened is not None:
            self._delay.started(opened, added)
            self._begun = now

    def _opened(self) -> float | None:
        """Time since which an idle executor could begin; None while it works, or none waits."""
        if not self._open or self._running or (oldest := self._queue.oldest) is None:
            return None
        return max(oldest, self._fill_from)
