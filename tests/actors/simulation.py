from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.admission import PolicySettings
from actors.messages import (
    Accepted,
    BatchEnded,
    BatchStarted,
    Cancel,
    Continuation,
    ExecutorReady,
    Release,
    Request,
    RowsFailed,
    RunBatch,
    Started,
    Submit,
)
from actors.scheduler_policy import Decision, SchedulerPolicy
from actors.waiting_queue import Entry
from runtime.request import RequestOptions

LIMITS = ExecutorReady(
    work="w", control="c", max_batch=8, max_prompt_tokens=4000, max_total_tokens=8000
)


def submit(
    rid: int,
    *,
    prompt: int = 10,
    tokens: int | None = 16,
    priority: int = 0,
    deadline: float | None = None,
) -> Submit:
    """A request of `prompt` tokens that will generate exactly `tokens`."""
    request = Request(rid, RequestOptions(max_tokens=tokens), priority, deadline)
    return Submit(request, [1] * prompt)


def entry(rid: int, queued: float = 0.0, **asked: Any) -> Entry:
    """The same as it waits."""
    message = submit(rid, **asked)
    return Entry(message.request, message.token_ids, arrived=0.0, queued=queued)


@dataclass
class Outcome:
    """What became of one request."""

    submitted: float
    accepted: list[float] = field(default_factory=list)
    started: float | None = None
    tokens: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended: float | None = None

    @property
    def wait(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.tokens[0] - self.submitted


@dataclass
class SimulatedBatch:
    """The executor's side of a batch."""

    number: int
    rows: dict[int, tuple[int, list[int]]]
    prefill_s: float
    decode_s: float = 0.0
    release: bool = False


class Simulation:
    """A scheduler policy, an executor with fixed step times, and a clock that jumps."""

    def __init__(
        self,
        settings: PolicySettings,
        *,
        limits: ExecutorReady = LIMITS,
        step_s: float = 0.01,
        prefill_s_per_token: float = 0.0,
        ready_at: float = 0.0,
    ) -> None:
        self.policy = SchedulerPolicy(settings)
        self.settings, self.limits = settings, limits
        self.now = 0.0
        self.outcomes: dict[int, Outcome] = {}
        self.batches: list[list[int]] = []
        self._step_s, self._prefill_s = step_s, prefill_s_per_token
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._failed: set[int] = set()
        self._batch: SimulatedBatch | None = None
        self.at(ready_at, self.make_ready)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def arrive(self, when: float, request: Submit) -> None:
        def action() -> None:
            self.outcomes[request.rid] = Outcome(self.now)
            self._apply(self.policy.submit(request, self.now))

        self.at(when, action)

    def cancel(self, when: float, rid: int) -> None:
        def action() -> None:
            self._apply(self.policy.cancel(rid))
            if rid in self.outcomes:
                self._end(rid, "cancelled")

        self.at(when, action)

    def lose(self, when: float, ready_again: float) -> None:
        def action() -> None:
            self._batch = None
            self._apply(self.policy.executor_lost("killed", self.now))

        self.at(when, action)
        self.at(ready_again, self.make_ready)

    def make_ready(self) -> None:
        self._batch = None
        self._apply(self.policy.executor_ready(self.limits, self.now))

    def run(self, until: float = float("inf")) -> None:
        while True:
            wake = self.policy.next_wake()
            next_event = self._events[0][0] if self._events else None
            times = [time for time in (wake, next_event) if time is not None]
            if not times or min(times) > until:
                return
            self.now = max(self.now, min(times))
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._apply(self.policy.tick(self.now))
            self._check()

    def _check(self) -> None:
        wake = self.policy.next_wake()
        assert wake is None or wake > self.now, "the policy must act on what is due"
        load = self.policy.report(0)
        if self.policy._present:
            # Rows put back at the hold limit were admitted before and are never refused.
            assert load.queued <= self.settings.queue_requests + self.limits.max_batch
        assert load.running <= self.limits.max_batch
        assert load.queued_tokens == sum(entry.prompt_tokens for entry in self.policy._queue)

    def _apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Accepted(rid):
                    self.outcomes[rid].accepted.append(self.now)
                case RowsFailed(rids, code):
                    for rid in rids:
                        self._fail(rid, code)
                case BatchStarted(rows):
                    for row in rows:
                        self._started(row)
                case RunBatch():
                    self._begin(decision)
                case Cancel(rid):
                    self._drop(rid)
                case Release(number):
                    self._release(number)

    def _fail(self, rid: int, code: str) -> None:
        assert rid not in self._failed, "a request fails once"
        self._failed.add(rid)
        self._end(rid, code)

    def _started(self, row: Started) -> None:
        outcome = self.outcomes[row.rid]
        assert outcome.started is None
        outcome.started = self.now
        assert abs(row.queued_s - (self.now - outcome.submitted)) < 1e-9

    def _drop(self, rid: int) -> None:
        assert self._batch, "a cancel goes to the executor only while a batch runs"
        self._batch.rows.pop(rid, None)

    def _release(self, number: int) -> None:
        assert self._batch
        assert self._batch.number == number
        assert not self._batch.release
        self._batch.release = True

    def _begin(self, run: RunBatch) -> None:
        assert self._batch is None, "one batch at a time"
        assert 0 < len(run.rows) <= self.limits.max_batch
        prefill_s = self._prefill_s * sum(len(row.token_ids) for row in run.rows.values())
        rows = {}
        for rid, row in run.rows.items():
            generated = row.token_ids[row.prompt_length :]
            assert len(self.outcomes[rid].tokens) == len(generated)
            rows[rid] = (row.options.max_tokens or 0, list(generated))
        self.batches.append(list(run.rows))
        batch = SimulatedBatch(run.batch, rows, prefill_s)
        self._batch = batch
        self.at(self.now + prefill_s + self._step_s, lambda: self._step(batch))

    def _step(self, batch: SimulatedBatch) -> None:
        if batch is not self._batch:
            return
        batch.decode_s += self._step_s
        for rid, (target, generated) in list(batch.rows.items()):
            generated.append(1)
            self.outcomes[rid].tokens.append(self.now)
            if len(generated) == target:
                del batch.rows[rid]
                self._end(rid, "done")
                self.policy.rows_ended([rid])
        if batch.rows and not (batch.release and batch.decode_s >= batch.prefill_s):
            self.at(self.now + self._step_s, lambda: self._step(batch))
            return
        self._batch = None
        rest = [Continuation(rid, generated) for rid, (_, generated) in batch.rows.items()]
        self.policy.batch_ended(BatchEnded(batch.number, rest), self.now)

    def _end(self, rid: int, how: str) -> None:
        # As in the tokenizer, what comes for a request that has ended is ignored.
        if not self.outcomes[rid].ends:
            self.outcomes[rid].ends.append(how)
            self.outcomes[rid].ended = self.now
