"""Schedules that are lost, doubled or late, and outputs that come twice."""

from __future__ import annotations

import random
from typing import Literal

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.actors.scheduler.policy import RESEND_S
from hearth.actors.settings import PolicySettings
from tests.actors.simulation import LIMITS, Simulation, submit

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
