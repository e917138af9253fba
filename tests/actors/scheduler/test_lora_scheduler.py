from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.scheduler.simulation import LIMITS, Simulation, output, ready, schedule_of, submit

SETTINGS = PolicySettings(adapter_turn_ms=500.0, queue_requests=4096, queue_tokens=1 << 30)
ONE_ROW = msgspec.structs.replace(LIMITS, max_batch=1)


def adapters(simulation: Simulation) -> list[str]:
    """The adapters of all batches, one after the other."""
    return [name for executor in simulation.executors for name in executor.adapters]


def test_rows_of_one_adapter_run_together_and_the_others_follow() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(8):
        simulation.arrive(0.0, submit(rid, adapter="ab"[rid % 2], client=rid))
    simulation.run()
    assert simulation.batches == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert adapters(simulation) == ["a", "b"]


def test_no_adapter_is_one_of_them() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=5))
    simulation.arrive(0.0, submit(2, tokens=5, adapter="a"))
    simulation.run()
    assert adapters(simulation) == ["", "a"]


def test_a_client_s_requests_for_one_adapter_do_not_wait_behind_those_for_another() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(8):
        simulation.arrive(0.0, submit(rid, adapter="ab"[rid % 2]))
    simulation.run()
    assert simulation.batches == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_long_reply_gives_way_once_its_turn_is_over_and_goes_on_behind() -> None:
    simulation = Simulation(SETTINGS, limits=ONE_ROW)
    simulation.arrive(0.0, submit(1, tokens=100, adapter="a"))
    simulation.arrive(0.1, submit(2, tokens=10, adapter="b"))
    simulation.run()
    assert simulation.batches == [[1], [2], [1]]
    assert simulation.outcomes[2].wait == pytest.approx(0.5 - 0.1 + 0.02, abs=0.02)
    assert len(simulation.outcomes[1].tokens) == 100


def test_the_next_are_offered_before_the_last_has_been_heard_of() -> None:
    simulation = Simulation(SETTINGS, limits=ONE_ROW, lag_s=0.1)
    simulation.arrive(0.0, submit(1, tokens=100, adapter="a"))
    simulation.arrive(0.1, submit(2, tokens=10, adapter="b"))
    simulation.run()
    # That the first has its place is heard 0.2 s later, and that it has come back as well.
    heard = 0.2 + SETTINGS.adapter_turn_s - 0.1 + 0.1
    assert simulation.outcomes[2].wait < heard + 0.05


def test_a_turn_lasts_as_long_as_nobody_else_waits() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=300, adapter="a"))
    for rid in range(2, 10):
        simulation.arrive(rid / 10, submit(rid, adapter="a"))
    simulation.arrive(2.0, submit(99, adapter="b"))
    simulation.run(until=1.9)
    assert simulation.policy.report(0).requeued == 0
    simulation.run()
    # The turn was over long ago: who comes now waits for no more of it.
    assert simulation.outcomes[99].wait < 0.03


def test_few_rows_have_a_short_turn() -> None:
    """Of eight places one has an eighth of the time, and all of them have it whole."""
    waits = []
    for rows in (1, 8):
        simulation = Simulation(SETTINGS)
        for rid in range(rows):
            simulation.arrive(0.0, submit(rid, tokens=200, adapter="a", client=rid))
        simulation.arrive(0.01, submit(99, adapter="b"))
        simulation.run()
        waits.append(simulation.outcomes[99].wait)
    assert waits[0] < 0.5 / 8 + 0.03
    assert 0.45 < waits[1] < 0.53


def test_a_turn_is_worth_the_prompts_that_it_computes_again() -> None:
    """It lasts for four times what it took until its first token, and for two seconds at most."""
    for prompt, most in ((290, 4 * 0.3), (790, 2.0)):
        simulation = Simulation(
            msgspec.structs.replace(SETTINGS, adapter_turn_ms=10.0),
            limits=ONE_ROW,
            prefill_s_per_token=0.001,
        )
        simulation.arrive(0.0, submit(1, prompt=prompt, tokens=400, adapter="a"))
        simulation.arrive(0.1, submit(2, adapter="b"))
        simulation.run()
        assert simulation.outcomes[2].placed[0] == pytest.approx(most, abs=0.05)


def test_a_row_that_got_its_place_at_the_end_of_a_turn_gives_way_as_the_others() -> None:
    policy = SchedulerPolicy(msgspec.structs.replace(SETTINGS, fill_wait_ms=0.0))
    policy.executor_ready(ready(ONE_ROW), 0.0)
    for rid, name in enumerate("aab", 1):
        policy.submit(submit(rid, adapter=name, client=rid), 0.0)
    policy.tick(0.0)
    policy.update(output(placed=[1]), 0.0)
    policy.tick(0.0)
    policy.update(output(slot_times={1: 0.0}), 0.01)
    wanted = schedule_of(policy.tick(0.6))
    assert (wanted.rows, wanted.preempted) == ([3], [1])
    policy.update(output(preempted={1: [7]}), 0.6)
    policy.update(output(placed=[2]), 0.6)
    assert schedule_of(policy.tick(0.6)).preempted == [2]


def test_a_higher_priority_ends_a_turn_and_a_lower_one_waits_for_it() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=200, adapter="a"))
    simulation.arrive(0.01, submit(2, tokens=200, adapter="b", priority=1))
    simulation.arrive(0.02, submit(3, adapter="a", client=3))
    simulation.run()
    assert simulation.outcomes[2].wait < 0.03
    # Nobody joins the others by coming later, and the first to come is the first to go on.
    assert list(map(sorted, simulation.batches)) == [[1], [2], [1, 3], [1]]


def test_those_of_low_priority_do_not_join_a_turn_that_only_a_high_one_prolongs() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=200, adapter="a", priority=2))
    simulation.arrive(0.1, submit(2, tokens=5, adapter="b"))
    simulation.arrive(1.0, submit(3, tokens=5, adapter="a", client=3))
    simulation.run()
    assert simulation.batches == [[1], [2], [3]]


def test_who_waits_for_an_adapter_that_was_removed_ends_and_others_do_not() -> None:
    simulation = Simulation(SETTINGS, limits=ONE_ROW)
    for rid, name in enumerate(("a", "b", "b", "a", "")):
        simulation.arrive(rid / 1000, submit(rid, adapter=name))
    simulation.at(0.01, lambda: simulation.gone("b"))
    simulation.run()
    ends = {rid: outcome.ends for rid, outcome in simulation.outcomes.items()}
    gone = ["adapter_unknown"]
    assert ends == {0: ["done"], 1: gone, 2: gone, 3: ["done"], 4: ["done"]}


@settings(max_examples=15, deadline=None)
@given(
    flooding=st.integers(1, 3),
    at=st.floats(0.0, 0.5),
    rows=st.integers(1, 4),
    prefill_s=st.sampled_from([0.0, 0.0005]),
    lag_s=st.sampled_from([0.0, 0.003]),
)
def test_nobody_starves(
    *, flooding: int, at: float, rows: int, prefill_s: float, lag_s: float
) -> None:
    """Whoever comes for an adapter of its own waits for one turn of each other at most."""
    simulation = Simulation(
        SETTINGS,
        limits=msgspec.structs.replace(LIMITS, max_batch=rows),
        step_s=0.03,
        prefill_s_per_token=prefill_s,
        lag_s=lag_s,
    )
    for rid in range(25 * flooding):
        request = submit(rid, tokens=10, adapter=str(rid % flooding), client=rid % 7)
        simulation.arrive(rid * 0.001, request)
    simulation.arrive(at, submit(9999, adapter="other"))
    simulation.run()
    # A turn ends with a step, and rows leave once they have decoded as long as they were read.
    turn = SETTINGS.adapter_turn_s + 2 * (0.03 + 0.05 * prefill_s * rows) + 6 * lag_s + 0.05
    assert simulation.outcomes[9999].wait <= flooding * turn + 0.1
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())


def first_tokens(load: float, names: str) -> float:
    """The 99th percentile of the time to the first token at a share of what a full batch gives."""
    rng = random.Random(1)
    simulation = Simulation(SETTINGS, step_s=0.02)
    seconds, mean = 60, 50
    count = round(load * LIMITS.max_batch / 0.02 / mean * seconds)
    for rid, at in enumerate(sorted(rng.uniform(0, seconds) for _ in range(count))):
        tokens = rng.randint(10, 2 * mean - 10)
        request = submit(rid, tokens=tokens, client=rid % 16, adapter=rng.choice(names))
        simulation.arrive(1 + at, request)
    simulation.run()
    waits = sorted(outcome.wait for outcome in simulation.outcomes.values())
    return waits[int(0.99 * len(waits))]


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_two_adapters_wait_at_most_twice_as_long_as_one(load: float) -> None:
    assert first_tokens(load, "ab") <= 2 * first_tokens(load, "a")
