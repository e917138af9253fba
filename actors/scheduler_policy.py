from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.admission import PolicySettings, Refusal, queue_refusal, size_refusal
from actors.fill_wait import FillWait
from actors.messages import (
    Accepted,
    BatchEnded,
    BatchStarted,
    Cancel,
    ExecutorReady,
    Release,
    RowsFailed,
    RunBatch,
    SchedulerReport,
    Started,
    Submit,
)
from actors.suspects import Suspects
from actors.waiting_queue import Entry, WaitingQueue, lowest_priority

Decision = Accepted | RowsFailed | BatchStarted | RunBatch | Cancel | Release | SchedulerReport
"""What is to be sent: Accepted, BatchStarted and SchedulerReport to the front door, RowsFailed to
the tokenizer, the others to the executor."""

_EXPIRED = Refusal(
    "deadline_exceeded", "the request's deadline has passed: allow it more time", "deadline_s"
)


_GUILTY = Refusal(
    "repeated_failure",
    "the executor failed each time that this request ran: change it, or try again in ten minutes",
    None,
)


@dataclass(slots=True)
class RunningBatch:
    """The batch that the executor holds; `rows` are the requests not known to have left it.

    `cancelled` are asked to leave: whether it got so far nobody knows before the batch's end.
    """

    number: int
    started: float
    rows: dict[int, Entry] = field(default_factory=dict)
    cancelled: list[Entry] = field(default_factory=list)
    released: bool = False

    def expired(self, now: float) -> list[int]:
        """The requests whose deadline has passed."""
        return [
            rid
            for rid, entry in self.rows.items()
            if entry.request.deadline is not None and entry.request.deadline <= now
        ]


class SchedulerPolicy:
    """Forms synchronous batches: requests and clock in, decisions out; no I/O.

    Feed it what happens, then `tick`: only `tick` starts, releases and expires. One batch runs
    at a time. A batch that is older than `hold_s` is released when somebody waits who would
    then run; its rows queue up as if they had just come, so neither side can starve the other.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._queue = WaitingQueue(settings.ageing_s)
        self._suspects = Suspects()
        self._fill_wait = FillWait(settings.fill_wait_s, settings.hold_s)
        self._limits: ExecutorReady | None = None
        self._max_batch = 0
        self._present = False
        self._running: RunningBatch | None = None
        # Since when an idle executor could be waiting for a batch to fill.
        self._fill_from = 0.0
        self._batches = self._rows = self._requeued = self._refused = 0

    def submit(self, message: Submit, now: float) -> list[Decision]:
        """Admit a request or refuse it."""
        request = message.request
        entry = Entry(request, message.token_ids, arrived=now, queued=now)
        refusal = size_refusal(entry, self._settings, self._limits)
        if refusal is None and request.deadline is not None and request.deadline <= now:
            refusal = _EXPIRED
        self._suspects.forget(now)
        if refusal is None and self._suspects.is_guilty(entry):
            refusal = _GUILTY
        refusal = refusal or queue_refusal(entry, self._queue, self._settings)
        if refusal is not None:
            self._refused += 1
            return [_failed([request.rid], refusal)]
        self._fill_wait.arrived(now)
        self._queue.push(entry)
        return self._accept(entry) if self._limits else []

    def cancel(self, rid: int) -> list[Decision]:
        """Forget a request; a running one is cancelled at the executor too."""
        if self._queue.remove(rid) is None and self._running and (left := self._left([rid])):
            self._running.cancelled += left
            return [Cancel(rid)]
        return []

    def rows_ended(self, rids: list[int]) -> None:
        """These rows have left the running batch, which is less full by them."""
        for entry in self._left(rids):
            self._suspects.ended(entry)

    def rows_failed(self, message: RowsFailed, now: float) -> list[Decision]:
        """The executor has told the failure of these rows."""
        if message.code != "executor_failed":
            self.rows_ended(message.rids)
            return []
        return self._note_failure(self._left(message.rids), now)

    def batch_ended(self, message: BatchEnded, now: float) -> None:
        """The executor is idle again; rows put back queue up behind those that wait."""
        if self._running is None or message.batch != self._running.number:
            return
        rows = self._running.rows
        self._fill_wait.ended(now - self._running.started)
        for left in self._running.cancelled:
            self._suspects.ended(left)
        self._running = None
        for continuation in message.unfinished:
            entry = rows.pop(continuation.rid, None)
            if entry is not None:
                entry.generated = list(continuation.generated)
                entry.queued = now
                self._queue.push(entry)
                self._requeued += 1
        # After a release others have waited long enough: there is nothing to wait for.
        self._fill_from = now - self._settings.fill_wait_s if message.unfinished else now

    def executor_ready(self, limits: ExecutorReady, now: float) -> list[Decision]:
        """A new executor waits for work; requests that came before its limits are checked now."""
        decisions = self.executor_lost("another executor has taken over", now)
        self._limits, self._max_batch = limits, limits.max_batch
        self._present, self._fill_from = True, now
        for entry in list(self._queue):
            refusal = size_refusal(entry, self._settings, limits)
            if refusal is None:
                decisions += self._accept(entry)
            else:
                self._queue.remove(entry.rid)
                self._refused += 1
                decisions.append(_failed([entry.rid], refusal))
        return decisions

    def executor_lost(self, reason: str, now: float) -> list[Decision]:
        """Fail all that was running; what waits goes on waiting."""
        self._present = False
        lost, self._running = self._running, None
        if lost is None:
            return []
        message = f"the executor was lost ({reason}): send the request again"
        failed = [RowsFailed(list(lost.rows), "executor_failed", message)] if lost.rows else []
        return failed + self._note_failure([*lost.rows.values(), *lost.cancelled], now)

    def tick(self, now: float) -> list[Decision]:
        """Act on the clock: expire, release a batch that held too long, start the next."""
        self._suspects.forget(now)
        decisions = self._expire(now)
        if self._running is None:
            opened = self._opened()
            if opened is not None and self._start_time(opened) <= now:
                decisions += self._start(opened, now)
        elif (due := self._release_time(self._running)) is not None and due <= now:
            self._running.released = True
            decisions.append(Release(self._running.number))
        return decisions

    def next_wake(self) -> float | None:
        """When `tick` has something to do next, if nothing happens before."""
        times = [self._queue.next_deadline]
        if self._running is None:
            opened = self._opened()
            times.append(None if opened is None else self._start_time(opened))
        else:
            times += [entry.request.deadline for entry in self._running.rows.values()]
            times.append(self._release_time(self._running))
        return min((time for time in times if time is not None), default=None)

    def report(self, rid: int) -> SchedulerReport:
        """What waits and runs now, and counts since the start."""
        return SchedulerReport(
            rid=rid,
            running=len(self._running.rows) if self._running else 0,
            queued=len(self._queue),
            queued_tokens=self._queue.prompt_tokens,
            batches=self._batches,
            rows=self._rows,
            requeued=self._requeued,
            refused=self._refused,
        )

    def _accept(self, entry: Entry) -> list[Decision]:
        if entry.accepted:
            return []
        entry.accepted = True
        return [Accepted(entry.rid, entry.prompt_tokens)]

    def _opened(self) -> float | None:
        """Since when a batch could start; None when none can."""
        oldest = self._queue.oldest
        return None if oldest is None or not self._present else max(oldest, self._fill_from)

    def _left(self, rids: list[int]) -> list[Entry]:
        rows = self._running.rows if self._running else {}
        return [entry for rid in rids if (entry := rows.pop(rid, None))]

    def _note_failure(self, entries: Iterable[Entry], now: float) -> list[Decision]:
        self._suspects.failed(entries, now)
        guilty = [entry.rid for entry in self._queue if self._suspects.is_guilty(entry)]
        for rid in guilty:
            self._queue.remove(rid)
        self._refused += len(guilty)
        return [_failed(guilty, _GUILTY)] if guilty else []

    def _batch_size(self) -> int:
        """How many rows the next batch takes: a suspect runs alone."""
        for ahead, entry in enumerate(self._queue.first(self._max_batch)):
            if self._suspects.runs_alone(entry):
                return max(1, ahead)
        return self._max_batch

    def _start_time(self, opened: float) -> float:
        full = len(self._queue) >= self._batch_size()
        return opened if full else opened + self._fill_wait.wait_s

    def _release_time(self, batch: RunningBatch) -> float | None:
        first = self._queue.first_arrival
        if first is None or batch.released:
            return None
        due = batch.started + self._settings.hold_s
        lowest = lowest_priority(batch.rows.values())
        if lowest is None or len(batch.rows) < self._max_batch:
            return due
        # A full batch goes on until its lowest row, put back, would stand behind the first.
        return max(due, first - self._queue.virtual_arrival(lowest, 0.0))

    def _start(self, opened: float, now: float) -> list[Decision]:
        entries = self._queue.take(self._batch_size())
        self._fill_wait.started(opened, len(entries))
        self._batches += 1
        self._rows += len(entries)
        batch = RunningBatch(self._batches, now, {entry.rid: entry for entry in entries})
        self._running = batch
        fresh = [entry for entry in entries if not entry.started]
        for entry in fresh:
            entry.started = True
        started = BatchStarted([Started(entry.rid, now - entry.arrived) for entry in fresh])
        run = RunBatch(batch.number, {entry.rid: entry.to_row() for entry in entries})
        return [started, run] if fresh else [run]

    def _expire(self, now: float) -> list[Decision]:
        running = self._running.expired(now) if self._running else []
        decisions: list[Decision] = []
        for rid in running:
            decisions += self.cancel(rid)
        expired = running + [entry.rid for entry in self._queue.take_expired(now)]
        if expired:
            decisions.append(_failed(expired, _EXPIRED))
        return decisions


def _failed(rids: list[int], refusal: Refusal) -> RowsFailed:
    return RowsFailed(rids, refusal.code, refusal.message, refusal.field)
