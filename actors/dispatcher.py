from __future__ import annotations

from hearth.actors.executor_messages import Schedule
from hearth.actors.messages import StepOutput
from hearth.actors.request_state import RequestState, RequestStatus
from hearth.actors.running_set import RunningSet

RESEND_S = 1.0
"""How long a schedule may be unseen before it is sent once more: it may have been dropped."""


class Dispatcher:
    """Writes the schedules of one executor, and reads how far it has seen them; no clock, no I/O.

    Each schedule is all that is wanted, by the status of the rows that run; it is written where one
    of them has a status of which the executor has not been told.
    """

    def __init__(self, running: RunningSet) -> None:
        self._running = running
        # The executor's number; None while there is none.
        self._incarnation: int | None = None
        # The last schedule that was written, the last that was seen, and the last output heard.
        self._seq = self._seen = self._heard = 0
        self._resend = 0.0

    def executor_ready(self, incarnation: int) -> None:
        """Begin anew with an executor that knows nothing."""
        self._incarnation = incarnation
        self._seq = self._seen = self._heard = 0

    def executor_lost(self) -> None:
        """Write nothing until the next executor is ready."""
        self._incarnation = None

    @property
    def due(self) -> float | None:
        """The time at which the last schedule is sent once more; None where it has been seen."""
        return None if self._incarnation is None or self._seen == self._seq else self._resend

    def is_news(self, output: StepOutput) -> bool:
        """Take note of an output; False where it is late, comes twice or is of another executor."""
        if output.incarnation != self._incarnation or output.number <= self._heard:
            return False
        self._heard, self._seen = output.number, min(max(output.seq, self._seen), self._seq)
        for rid in output.missing:
            row = self._running.get(rid)
            if row is not None and row.seq is not None and row.seq <= output.seq:
                row.seq = None
        return True

    def given_up(self, output: StepOutput) -> list[RequestState]:
        """The rows of which this output says, by the schedule that it has seen, that they left.

        They are wanted back without having got places, or are cancelled.
        """
        return [row for row in self._running if _is_given_up(row, output)]

    def next(self, now: float) -> Schedule | None:
        """The schedule that is to be sent now, if the last one is not what is wanted any more."""
        if self._incarnation is None:
            return None
        news = [row for row in self._running if row.seq is None]
        unseen = self._seen < self._seq and self._resend <= now
        if not news and not unseen:
            return None
        self._seq, self._resend = self._seq + 1, now + RESEND_S
        for row in news:
            row.seq = self._seq
        scheduled = self._running.scheduled
        return Schedule(
            self._incarnation,
            self._seq,
            self._heard,
            rows=[row.rid for row in scheduled],
            new={row.rid: row.to_row() for row in scheduled if row.seq == self._seq},
            preempted=self._with(RequestStatus.PREEMPTING),
            urgent=self._with(RequestStatus.PREEMPTING_AT_ONCE),
            cancelled=self._with(RequestStatus.CANCELLING),
        )

    def _with(self, status: RequestStatus) -> list[int]:
        return [row.rid for row in self._running if row.status is status]


def _is_given_up(row: RequestState, output: StepOutput) -> bool:
    if row.status is RequestStatus.SCHEDULED:
        return output.retiring
    seen = output.seq >= row.seq if row.seq is not None else False
    if row.status is RequestStatus.WITHDRAWING:
        return seen or output.retiring
    return row.status is RequestStatus.CANCELLING and (
        seen or (output.retiring and not row.has_slot)
    )
