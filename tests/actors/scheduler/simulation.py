from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hearth.actors.messages import (
    Accepted,
    ExecutorLimits,
    ExecutorLost,
    ExecutorReady,
    Failed,
    Request,
    RowsCut,
    Schedule,
    SchedulerReport,
    StepOutput,
)
from hearth.actors.scheduler.policy import Decision, SchedulerPolicy
from hearth.actors.scheduler.request_state import RequestState, RequestStatus
from hearth.actors.settings import PolicySettings
from hearth.runtime.request import RequestOptions
from tests.actors.scheduler.simulated_executor import SimulatedExecutor

SEEN = 1 << 60
"""The number of a schedule that is newer than any."""


_NUMBERS = itertools.count(1)
LIMITS = ExecutorLimits(max_batch=8, max_prompt_tokens=4000, max_total_tokens=8000)


def ready(limits: ExecutorLimits, incarnation: int = 1) -> ExecutorReady:
    return ExecutorReady(incarnation, "w", limits)


def output(incarnation: int = 1, seq: int = 0, **changes: Any) -> StepOutput:
    """The next output of an executor that has seen the schedule of this number."""
    return StepOutput(incarnation, next(_NUMBERS), seq, **changes)


def schedule_of(decisions: list[Any]) -> Schedule:
    """The one schedule among what is to be sent."""
    (found,) = [one for one in decisions if isinstance(one, Schedule)]
    return found


def new_rows(decisions: list[Any]) -> list[int]:
    """The requests that the executor is sent, as far as it is sent a schedule."""
    return [rid for one in decisions if isinstance(one, Schedule) for rid in one.new]


def submit(
    rid: int,
    *,
    prompt: int = 10,
    tokens: int | None = 16,
    priority: int = 0,
    deadline: float | None = None,
    client: int = 0,
    adapter: str = "",
) -> Request:
    """A request of `prompt` tokens that will generate exactly `tokens`."""
    options = RequestOptions(max_tokens=tokens, adapter=adapter)
    return Request(rid, options, priority, deadline, client, token_ids=[1] * prompt)


def entry(rid: int, queued: float = 0.0, **asked: Any) -> RequestState:
    """The same as it waits."""
    return RequestState(submit(rid, **asked), queued)


@dataclass
class Outcome:
    """What became of one request."""

    submitted: float
    accepted: list[float] = field(default_factory=list)
    placed: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended: float | None = None

    @property
    def wait(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.tokens[0] - self.submitted


class Simulation:
    """A scheduler policy, a tokenizer that passes on outputs, an executor, and a clock that jumps.

    What the executor says takes `lag_s` to the tokenizer, and as long again to the policy. `post`
    says when each message to the executor comes there, in seconds from now: never, where it is
    lost, or several times. `echo` says the same of outputs to the policy, which are not lost.
    """

    def __init__(
        self,
        settings: PolicySettings,
        *,
        limits: ExecutorLimits = LIMITS,
        step_s: float = 0.01,
        prefill_s_per_token: float = 0.0,
        ready_at: float = 0.0,
        lag_s: float = 0.0,
        chunk_s: float | None = None,
        post: Callable[[], Sequence[float]] = lambda: (0.0,),
        echo: Callable[[], Sequence[float]] = lambda: (0.0,),
    ) -> None:
        self.policy = SchedulerPolicy(settings)
        self.settings, self.limits = settings, limits
        self.now = 0.0
        self.outcomes: dict[int, Outcome] = {}
        self.executor: SimulatedExecutor | None = None
        self.executors: list[SimulatedExecutor] = []
        self.withdrawn = 0
        self._post, self._echo = post, echo
        self._heard = 0
        self._step_s, self._prefill_s, self._lag_s = step_s, prefill_s_per_token, lag_s
        self._chunk_s = chunk_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._failed: set[int] = set()
        self._working = False
        self.at(ready_at, self.make_ready)

    @property
    def batches(self) -> list[list[int]]:
        """The requests of each step, without repetitions."""
        steps = [rids for executor in self.executors for rids in executor.steps]
        return [rids for rids, _ in itertools.groupby(steps)]

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def arrive(self, when: float, message: Request) -> None:
        def action() -> None:
            self.outcomes[message.rid] = Outcome(self.now)
            self._apply(self.policy.submit(message, self.now))

        self.at(when, action)

    def cancel(self, when: float, rid: int) -> None:
        def action() -> None:
            self.policy.cancel(rid)
            if rid in self.outcomes:
                self._end(rid, "cancelled")

        self.at(when, action)

    def gone(self, adapter: str) -> None:
        """An adapter is removed now."""
        self._apply(self.policy.adapter_gone(adapter))

    def lose(self, when: float, ready_again: float) -> None:
        def action() -> None:
            self.executor = None
            self._pass_on(ExecutorLost("killed"))

        self.at(when, action)
        self.at(ready_again, self.make_ready)

    def make_ready(self) -> None:
        made = SimulatedExecutor(
            incarnation=len(self.executors) + 1,
            places=self.limits.max_batch,
            step_s=self._step_s,
            prefill_s=self._prefill_s,
            tell=self._tell,
            chunk_s=self._chunk_s,
        )
        self.executor = made
        self.executors.append(made)
        self._working, self._heard = False, 0
        told = ready(self.limits, made.incarnation)
        if made.incarnation == 1:
            # Limits hold from `ready_at` on: what comes before is not refused by them.
            self._to_policy(told)
        else:
            self._pass_on(told)

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
        assert load.running <= load.places
        running = self.policy._running
        assert len(running.offered) <= running.slots
        assert running.unplaced <= 2 * running.slots
        if self.settings.batching == "synchronous":
            assert len(running) <= running.slots

    def _apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Accepted(rid):
                    self.outcomes[rid].accepted.append(self.now)
                case Failed(rids, code):
                    for rid in rids:
                        self._fail(rid, code)
                case RowsCut(rids):
                    for rid in rids:
                        self._end(rid, "cut")
                case SchedulerReport():
                    raise AssertionError("nobody has asked")
                case _:
                    self._mail(decision)

    def _mail(self, message: Any) -> None:
        if self.executor is None:
            # It has died, of which the policy is about to hear.
            assert self._lag_s
            return
        if isinstance(message, Schedule):
            if message.incarnation != self.executor.incarnation:
                # Another has taken over, of which the policy is about to hear.
                assert self._lag_s
                return
            for rid, row in message.new.items():
                done = len(row.token_ids) - row.prompt_length
                assert len(self.outcomes[rid].tokens) == done, "no token is made twice"
            self.withdrawn += sum(
                row.status is RequestStatus.WITHDRAWING and row.seq == message.seq
                for row in self.policy._running
            )
        for seconds in self._post():
            if seconds:
                self._later(seconds, self.executor, lambda one: self._deliver(one, message))
            else:
                self._deliver(self.executor, message)

    def _deliver(self, executor: SimulatedExecutor, message: Any) -> None:
        executor.mail.append(message)
        if not self._working:
            self._working = True
            self._later(0.0, executor, self._turn)

    def _later(
        self,
        seconds: float,
        executor: SimulatedExecutor,
        action: Callable[[SimulatedExecutor], None],
    ) -> None:
        self.at(self.now + seconds, lambda: action(executor) if executor is self.executor else None)

    def _turn(self, executor: SimulatedExecutor) -> None:
        seconds = executor.border()
        self._working = seconds is not None
        if seconds is not None:
            self._later(seconds, executor, self._step)

    def _step(self, executor: SimulatedExecutor) -> None:
        executor.step(self.now)
        self._turn(executor)

    def _tell(self, output: StepOutput) -> None:
        if self._lag_s:
            self.at(self.now + self._lag_s, lambda: self._heed(output))
        else:
            self._heed(output)

    def _heed(self, output: StepOutput) -> None:
        """The tokenizer hears of the executor."""
        executor = self.executor
        if executor is None or output.incarnation != executor.incarnation:
            return
        assert output.number == self._heard + 1
        self._heard = output.number
        for rid in output.placed:
            self.outcomes[rid].placed.append(self.now)
        for rid in [token.row for token in output.tokens]:
            if not self.outcomes[rid].ends:
                self.outcomes[rid].tokens.append(self.now)
        for rid in output.finished:
            self._end(rid, "done")
        if (told := output.without_tokens()) is not None:
            for seconds in self._echo():
                self._pass_on(told, seconds)

    def _pass_on(
        self, told: StepOutput | ExecutorReady | ExecutorLost, late_s: float = 0.0
    ) -> None:
        seconds = self._lag_s + late_s
        if seconds:
            self.at(self.now + seconds, lambda: self._to_policy(told))
        else:
            self._to_policy(told)

    def _to_policy(self, told: StepOutput | ExecutorReady | ExecutorLost) -> None:
        match told:
            case ExecutorReady():
                self._apply(self.policy.executor_ready(told, self.now))
            case StepOutput():
                self._apply(self.policy.update(told, self.now))
            case ExecutorLost(reason):
                self._apply(self.policy.executor_lost(reason, self.now))

    def _fail(self, rid: int, code: str) -> None:
        assert rid not in self._failed, "a request fails once"
        self._failed.add(rid)
        self._end(rid, code)

    def _end(self, rid: int, how: str) -> None:
        # As in the tokenizer, what comes for a request that has ended is ignored.
        if not self.outcomes[rid].ends:
            self.outcomes[rid].ends.append(how)
            self.outcomes[rid].ended = self.now
