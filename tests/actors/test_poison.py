"""A request that fails the executor is found and refused; those beside it are not."""

from __future__ import annotations

from actors.admission import PolicySettings
from actors.messages import (
    Accepted,
    BatchEnded,
    Cancel,
    Request,
    RowsFailed,
    RunBatch,
    Submit,
)
from actors.scheduler_policy import Decision, SchedulerPolicy
from actors.suspects import MEMORY_S
from runtime.request import RequestOptions
from tests.actors.simulation import LIMITS

POISON, INNOCENT, OTHER = [6, 6, 6], [1, 2], [3, 4]


class Desk:
    """A policy with an executor, and a clock."""

    def __init__(self) -> None:
        self.policy = SchedulerPolicy(PolicySettings(fill_wait_s=0.0))
        self.now = 0.0
        self.rid = 0
        self.policy.executor_ready(LIMITS, self.now)

    def ask(self, *prompts: list[int]) -> list[Decision]:
        """Ask for a reply to each, as a client would that tries again: with a seed of its own."""
        decisions = []
        for prompt in prompts:
            self.rid += 1
            request = Request(self.rid, RequestOptions(max_tokens=9, seed=self.rid))
            decisions += self.policy.submit(Submit(request, prompt), self.now)
        return decisions

    def run(self) -> list[list[int]]:
        """Start the next batch; the prompts of its rows."""
        self.now += 1.0
        runs = [one for one in self.policy.tick(self.now) if isinstance(one, RunBatch)]
        self.batch = runs[0].batch if runs else 0
        self.rows = list(runs[0].rows) if runs else []
        return [row.token_ids for run in runs for row in run.rows.values()]

    def end(self) -> None:
        self.policy.rows_ended(self.rows)
        self.policy.batch_ended(BatchEnded(self.batch), self.now)

    def die(self) -> list[Decision]:
        decisions = self.policy.executor_lost("it was ended by SIGSEGV", self.now)
        return decisions + self.policy.executor_ready(LIMITS, self.now)


def codes(decisions: list[Decision]) -> list[str]:
    return [one.code for one in decisions if isinstance(one, RowsFailed)]


def test_the_second_death_refuses_the_request_by_name_and_nobody_beside_it() -> None:
    desk = Desk()
    desk.ask(INNOCENT, POISON, OTHER)
    assert desk.run() == [INNOCENT, POISON, OTHER]
    assert codes(desk.die()) == ["executor_failed"]
    desk.ask(INNOCENT, POISON, OTHER)
    assert desk.run() == [INNOCENT]
    desk.end()
    assert desk.run() == [POISON]
    assert codes(desk.die()) == ["executor_failed"]
    assert codes(desk.ask(POISON)) == ["repeated_failure"]
    assert desk.run() == [OTHER]
    desk.end()
    assert [type(one) for one in desk.ask(INNOCENT, OTHER)] == [Accepted, Accepted]
    assert desk.run() == [INNOCENT, OTHER]


def test_others_share_a_batch_up_to_a_suspect_and_behind_it() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(INNOCENT, OTHER, POISON, OTHER, INNOCENT)
    assert desk.run() == [INNOCENT, OTHER]
    desk.end()
    assert desk.run() == [POISON]
    desk.end()
    assert desk.run() == [OTHER, INNOCENT]


def test_a_failure_that_the_executor_told_counts_once() -> None:
    desk = Desk()
    desk.ask(POISON, INNOCENT)
    desk.run()
    told = RowsFailed(desk.rows, "executor_failed", "the device failed")
    assert desk.policy.rows_failed(told, desk.now) == []
    desk.die()
    assert desk.policy.rows_failed(told, desk.now) == []
    assert codes(desk.ask(POISON)) == []
    assert desk.run() == [POISON]


def test_a_row_that_fails_by_itself_is_no_suspect() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.policy.rows_failed(RowsFailed(desk.rows, "out_of_memory", "no room"), desk.now)
    desk.policy.batch_ended(BatchEnded(desk.batch), desk.now)
    desk.ask(POISON, INNOCENT)
    assert desk.run() == [POISON, INNOCENT]


def test_a_twin_that_waits_is_refused_with_it() -> None:
    desk = Desk()
    desk.ask(POISON)
    desk.run()
    desk.die()
    desk.ask(POISON, POISON, INNOCENT)
    assert desk.run() == [POISON]
    assert codes(desk.die()) == ["executor_failed", "repeated_failure"]
    assert desk.run() == [INNOCENT]


def test_a_refusal_is_forgotten_after_some_time() -> None:
    desk = Desk()
    for _ in range(2):
        desk.ask(POISON)
        desk.run()
        desk.die()
    assert codes(desk.ask(POISON)) == ["repeated_failure"]
    desk.now += MEMORY_S
    assert codes(desk.ask(POISON)) == []


def test_a_request_that_was_cancelled_while_the_executor_hung_is_suspected() -> None:
    desk = Desk()
    for _ in range(2):
        assert codes(desk.ask(POISON)) == []
        assert desk.run() == [POISON]
        assert desk.policy.cancel(desk.rid) == [Cancel(desk.rid)]
        assert codes(desk.die()) == []
    assert codes(desk.ask(POISON)) == ["repeated_failure"]


def test_a_suspect_that_ends_at_a_stop_string_is_cleared() -> None:
    desk = Desk()
    desk.ask(INNOCENT)
    desk.run()
    desk.die()
    desk.ask(INNOCENT)
    assert desk.run() == [INNOCENT]
    # The tokenizer found the stop string and has the executor drop the row.
    assert desk.policy.cancel(desk.rid) == [Cancel(desk.rid)]
    desk.policy.batch_ended(BatchEnded(desk.batch), desk.now)
    desk.ask(INNOCENT, OTHER)
    assert desk.run() == [INNOCENT, OTHER]
