"""Offers that are taken back, and those of an executor that died."""

from __future__ import annotations

import msgspec
import pytest

from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.simulation import (
    LIMITS,
    SEEN,
    Simulation,
    new_rows,
    output,
    ready,
    schedule_of,
    submit,
)

ONE_ROW = msgspec.structs.replace(LIMITS, max_batch=1)


@pytest.fixture
def policy() -> SchedulerPolicy:
    """One place, taken by request 1; requests 2 to 4 wait, of which 2 is offered."""
    made = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0, hold_s=50.0))
    made.executor_ready(ready(ONE_ROW), 0.0)
    for rid in (1, 2, 3, 4):
        made.submit(submit(rid, client=1), 0.0)
    assert new_rows(made.tick(0.0)) == [1]
    made.update(output(placed=[1]), 0.0)
    assert new_rows(made.tick(0.0)) == [2]
    return made


def test_a_revoked_request_stands_where_it_stood(policy: SchedulerPolicy) -> None:
    policy.submit(submit(10, client=1), 3.0)
    policy.update(output(finished=[1]), 4.0)
    policy.update(output(placed=[2]), 4.0)
    assert new_rows(policy.tick(4.0)) == [3]
    policy.submit(submit(11, client=3, priority=2), 5.0)
    assert schedule_of(policy.tick(5.0)).rows == [11]
    policy.update(output(seq=SEEN), 5.0)
    policy.update(output(finished=[2]), 6.0)
    policy.update(output(placed=[11]), 6.0)
    assert new_rows(policy.tick(6.0)) == [3]


def test_a_row_that_got_its_place_before_it_was_revoked_runs_as_any_other(
    policy: SchedulerPolicy,
) -> None:
    policy.submit(submit(11, client=3, priority=2), 5.0)
    assert schedule_of(policy.tick(5.0)).rows == [11]
    policy.update(output(finished=[1]), 5.0)
    policy.update(output(placed=[2]), 5.0)
    # It is the one that gives way now.
    assert schedule_of(policy.tick(5.0)).preempted == [2]


def test_a_request_that_is_cancelled_on_its_way_back_does_not_come_again(
    policy: SchedulerPolicy,
) -> None:
    policy.submit(submit(11, client=3, priority=2), 5.0)
    assert schedule_of(policy.tick(5.0)).rows == [11]
    policy.cancel(2)
    policy.update(output(seq=SEEN), 5.0)
    policy.update(output(finished=[1]), 5.0)
    policy.update(output(placed=[11]), 5.0)
    assert new_rows(policy.tick(5.0)) == [3]


@pytest.mark.parametrize(
    ("lost", "end"),
    [
        (0.02, "done"),  # The tokenizer has heard nothing, but will.
        (0.035, "executor_failed"),  # It has heard of places, and nobody else has.
        (0.08, "executor_failed"),  # The policy has heard too.
    ],
)
def test_what_nobody_has_heard_of_runs_again_and_its_late_tokens_are_dropped(
    lost: float, end: str
) -> None:
    """Word of a place takes 30 ms to the tokenizer, and as long again to the policy."""
    simulation = Simulation(PolicySettings(), lag_s=0.03)
    for rid in range(8):
        simulation.arrive(0.0, submit(rid, tokens=10 + rid))
    simulation.lose(lost, lost + 0.3)
    simulation.run()
    assert [outcome.ends for outcome in simulation.outcomes.values()] == [[end]] * 8
    if end == "done":
        counts = [len(outcome.tokens) for outcome in simulation.outcomes.values()]
        assert counts == [10 + rid for rid in range(8)]
        # All of them are suspected, so each runs alone.
        assert {len(rids) for rids in simulation.executors[1].steps} == {1}
