"""Schedules that are lost, doubled or late, and offers that are taken back."""

from __future__ import annotations

import random
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.actors.scheduler.offers import BatchingDelay
from hearth.actors.scheduler.policy import RESEND_S, SchedulerPolicy
from hearth.actors.settings import PolicySettings, Reloadable
from tests.actors.scheduler.simulation import (
    LIMITS,
    SEEN,
    Simulation,
    new_rows,
    output,
    ready,
    schedule_of,
    submit,
)

REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 3),  # arrival
        st.integers(1, 60),  # tokens
        st.integers(-2, 2),  # priority
        st.integers(0, 3),  # client
        st.none() | st.floats(0, 4),  # cancelled after arrival
        st.sampled_from(["", "", "a"]),  # adapter
    ),
    max_size=40,
)


class Post:
    """A channel that loses, doubles and delays what is posted, by chance."""

    def __init__(self, seed: int, lost: float, doubled: float, late: float) -> None:
        self._chance = random.Random(seed)
        self._lost, self._doubled, self._late = lost, doubled, late

    def __call__(self) -> tuple[float, ...]:
        """Times at which one message comes: never, now, later, or both of these."""
        chance = self._chance.random
        if chance() < self._lost:
            return ()
        later = 0.3 * chance()
        if chance() < self._doubled:
            return (0.0, later)
        return (later,) if chance() < self._late else (0.0,)


def doubled(seed: int) -> Post:
    """All of it comes in order, and some of it once more."""
    return Post(seed, 0.0, 0.3, 0.0)


@settings(max_examples=100, deadline=None)
@given(
    requests=REQUESTS,
    rows=st.integers(1, 4),
    batching=st.sampled_from(["joining", "synchronous"]),
    seed=st.integers(0, 1000),
    lost=st.sampled_from([0.0, 0.1, 0.5]),
    late=st.sampled_from([0.0, 0.5]),
    losses=st.lists(st.floats(0, 4), max_size=1),
    lag_s=st.sampled_from([0.0, 0.03]),
)
def test_every_request_ends_once_with_its_tokens_whatever_is_lost(
    *,
    requests: list[tuple[float, int, int, int, float | None, str]],
    rows: int,
    batching: Literal["joining", "synchronous"],
    seed: int,
    lost: float,
    late: float,
    losses: list[float],
    lag_s: float,
) -> None:
    """The simulation looks that no row is sent anew for which tokens were made."""
    simulation = Simulation(
        PolicySettings(batching=batching, hold_s=0.2, ageing_s=0.5),
        limits=msgspec.structs.replace(LIMITS, max_batch=rows),
        prefill_s_per_token=0.0005,
        lag_s=lag_s,
        post=Post(seed, lost, 0.2, late),
        echo=doubled(seed),
    )
    for rid, (arrival, tokens, priority, client, gone, adapter) in enumerate(requests):
        asked = submit(rid, tokens=tokens, priority=priority, client=client, adapter=adapter)
        simulation.arrive(arrival, asked)
        if gone is not None:
            simulation.cancel(arrival + gone, rid)
    for at in losses:
        simulation.lose(at, at + 0.3)
    simulation.run()
    for rid, (_, tokens, *_rest) in enumerate(requests):
        outcome = simulation.outcomes[rid]
        assert len(outcome.ends) == 1
        if outcome.ends == ["done"]:
            assert len(outcome.tokens) == tokens
    assert not len(simulation.policy._running)
    assert simulation.policy.report(0).queued == 0
    for executor in simulation.executors[-1:]:
        assert not executor.rows
        assert not executor.state.waiting


def test_a_schedule_that_is_lost_is_sent_again_without_anything_that_happens() -> None:
    come = iter([(), ()])
    simulation = Simulation(PolicySettings(fill_wait_ms=0.0), post=lambda: next(come, (0.0,)))
    simulation.arrive(1.0, submit(1, tokens=3))
    simulation.run()
    # The third has no request any more, and the fourth brings it.
    assert simulation.outcomes[1].placed == [1.0 + 2 * RESEND_S]
    assert simulation.outcomes[1].ends == ["done"]


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


WAIT, HOLD = 0.005, 2.0


def batching_delay(wait_s: float = WAIT) -> BatchingDelay:
    return BatchingDelay(Reloadable(PolicySettings(fill_wait_ms=1000 * wait_s, hold_s=HOLD)))


def live(wait: BatchingDelay, windows: int, *, rows: int = 1, seconds: float = 0.5) -> None:
    """So many batches that begin with `rows` rows, and nobody comes after."""
    for number in range(windows):
        wait.started(float(number), rows)
        wait.ended(seconds)


def test_others_are_expected_at_first() -> None:
    assert batching_delay().wait_s == WAIT


def test_who_is_always_alone_waits_no_longer() -> None:
    wait = batching_delay()
    live(wait, 100)
    assert wait.wait_s == WAIT
    live(wait, 100)
    assert wait.wait_s == 0


def test_batches_of_several_rows_are_worth_a_wait() -> None:
    wait = batching_delay()
    live(wait, 1000, rows=2)
    assert wait.wait_s == WAIT


@pytest.mark.parametrize(("late_s", "waits"), [(0.004, WAIT), (0.006, 0)])
def test_who_comes_in_the_window_counts_also_when_nobody_waited(
    late_s: float, waits: float
) -> None:
    wait = batching_delay()
    live(wait, 300)
    assert wait.wait_s == 0
    for number in range(3):
        opened = 1000.0 + number
        wait.started(opened, 1)
        wait.arrived(opened + late_s)
        wait.ended(0.5)
    assert wait.wait_s == waits


def test_a_window_counts_once_however_many_come() -> None:
    crowd, pair = batching_delay(), batching_delay()
    for wait, many in ((crowd, 9), (pair, 1)):
        live(wait, 300)
        wait.started(1000.0, 1)
        for _ in range(many):
            wait.arrived(1000.001)
    assert crowd._share == pair._share


def test_the_shorter_the_batches_the_less_there_is_to_miss() -> None:
    short, long = batching_delay(), batching_delay()
    live(short, 150, seconds=0.05)
    live(long, 150, seconds=1.0)
    assert (short.wait_s, long.wait_s) == (0, WAIT)


def test_a_batch_that_is_held_up_costs_others_no_more_than_the_limit() -> None:
    wait = batching_delay()
    live(wait, 10, seconds=1000.0)
    assert wait._batch_s == HOLD


def test_without_a_wait_there_is_none() -> None:
    assert batching_delay(0.0).wait_s == 0
