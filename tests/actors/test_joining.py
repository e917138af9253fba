"""Rows that take places between the steps of others, as the policy has it."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from hearth.actors.settings import PolicySettings
from tests.actors.simulation import LIMITS, Simulation, submit

SETTINGS = PolicySettings()
TWO_ROWS = msgspec.structs.replace(LIMITS, max_batch=2)
STEP_S = 0.01


def test_a_request_takes_a_free_place_at_the_next_border() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=200))
    simulation.arrive(0.503, submit(2))
    simulation.run()
    assert simulation.outcomes[2].wait <= 2 * STEP_S
    assert simulation.batches == [[1], [1, 2], [1]]


@pytest.mark.parametrize("lag_s", [0.0, 0.004])
def test_a_place_is_taken_at_the_very_border_at_which_it_frees(lag_s: float) -> None:
    simulation = Simulation(SETTINGS, limits=TWO_ROWS, lag_s=lag_s)
    for rid in range(10):
        simulation.arrive(0.0, submit(rid, tokens=10 + rid))
    simulation.run()
    steps = simulation.executors[0].steps
    assert sum(len(rids) for rids in steps) == sum(10 + rid for rid in range(10))
    # The house is full as long as there is somebody who could be placed.
    last = next(number for number, rids in enumerate(steps) if 9 in rids)
    assert {len(rids) for rids in steps[:last]} == {2}


def test_the_row_placed_first_gives_way_to_who_waits_and_the_others_go_on() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5), limits=TWO_ROWS)
    for rid in (1, 2):
        simulation.arrive(rid * 0.1, submit(rid, tokens=100))
    simulation.arrive(0.3, submit(3, tokens=5))
    simulation.run()
    assert simulation.batches[:4] == [[1], [1, 2], [2, 3], [2, 1]]
    assert simulation.outcomes[3].placed == [pytest.approx(0.105 + 0.5, abs=2 * STEP_S)]
    assert simulation.policy.report(0).requeued == 1


def test_the_lowest_priority_gives_way_first() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5, ageing_s=0.1), limits=TWO_ROWS)
    simulation.arrive(0.0, submit(1, tokens=300, priority=1))
    simulation.arrive(0.0, submit(2, tokens=300, priority=0))
    simulation.arrive(0.3, submit(3, tokens=10))
    simulation.run(until=1.0)
    assert simulation.batches[:2] == [[1, 2], [1, 3]]


def test_one_that_has_paid_gives_way_before_one_whose_prompt_is_still_read() -> None:
    simulation = Simulation(
        PolicySettings(hold_s=0.5),
        limits=TWO_ROWS,
        prefill_s_per_token=0.001,
        chunk_s=0.02,
        lag_s=0.001,
    )
    simulation.arrive(0.0, submit(1, prompt=3000, tokens=300))
    simulation.arrive(0.1, submit(2, prompt=10, tokens=300))
    simulation.arrive(0.3, submit(3, prompt=10, tokens=5))
    simulation.run()
    # The first has had its place for longer, and would give way after six seconds.
    assert simulation.outcomes[3].placed[0] < 0.7
    assert len(simulation.outcomes[1].placed) == 1


def test_without_anybody_who_waits_nobody_gives_way() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.1), limits=TWO_ROWS)
    for rid in (1, 2):
        simulation.arrive(0.0, submit(rid, tokens=300))
    simulation.run()
    assert simulation.batches == [[1, 2]]


def test_a_higher_priority_takes_one_place_at_once() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(8):
        simulation.arrive(0.0, submit(rid, tokens=190))
    simulation.arrive(0.2, submit(9, tokens=20, priority=1))
    simulation.run()
    assert simulation.outcomes[9].wait <= 3 * STEP_S
    assert simulation.policy.report(0).requeued == 1
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())
    # Seven others had a token from every step meanwhile.
    kept = [rid for rid in range(8) if len(simulation.outcomes[rid].placed) == 1]
    assert len(kept) == 7
    for rid in kept:
        tokens = simulation.outcomes[rid].tokens
        gaps = [later - one for one, later in itertools.pairwise(tokens)]
        assert max(gaps) <= STEP_S + 1e-6


def test_a_higher_priority_does_not_take_back_what_a_prefill_has_cost() -> None:
    simulation = Simulation(SETTINGS, limits=TWO_ROWS, prefill_s_per_token=0.001)
    for rid in (1, 2):
        simulation.arrive(0.0, submit(rid, prompt=300, tokens=100))
    simulation.arrive(0.7, submit(3, prompt=1, tokens=2, priority=5))
    simulation.run()
    # Both were prefilled by 0.605 s, at 0.3 s each.
    assert simulation.outcomes[3].placed[0] == pytest.approx(0.605 + 0.3, abs=2 * STEP_S)


def test_who_is_higher_is_offered_in_place_of_the_last() -> None:
    simulation = Simulation(PolicySettings(hold_s=100.0), limits=TWO_ROWS)
    for rid in range(6):
        simulation.arrive(0.0, submit(rid, tokens=50 + rid, priority=0))
    simulation.arrive(0.1, submit(10, tokens=10, priority=0))
    simulation.arrive(0.2, submit(11, tokens=10, priority=1))
    simulation.run()
    assert simulation.withdrawn >= 1
    placed = sorted(simulation.outcomes, key=lambda rid: simulation.outcomes[rid].placed[0])
    assert placed == [0, 1, 11, 2, 3, 4, 5, 10]
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())


def test_a_client_that_floods_does_not_hold_up_another() -> None:
    simulation = Simulation(PolicySettings(hold_s=100.0, queue_requests=1000))
    for rid in range(500):
        simulation.arrive(0.0, submit(rid, client=1, tokens=20))
    for rid in range(1000, 1010):
        simulation.arrive((rid - 999) * 0.3, submit(rid, client=2, tokens=20))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1000, 1010)]
    # One turnover of the house: the rows that were lined up ahead give way.
    assert max(waits) <= 20 * STEP_S + 3 * STEP_S
    assert simulation.outcomes[499].wait > 10


def test_one_client_s_requests_keep_the_order_of_priority_and_ageing() -> None:
    simulation = Simulation(
        PolicySettings(hold_s=100.0), limits=msgspec.structs.replace(LIMITS, max_batch=1)
    )
    for rid, priority in enumerate((0, 0, 0, 1, -1, 2)):
        simulation.arrive(0.0, submit(rid, priority=priority, client=3))
    simulation.run()
    placed = sorted(simulation.outcomes, key=lambda rid: simulation.outcomes[rid].placed[0])
    assert placed == [5, 3, 0, 1, 2, 4]


def test_offered_rows_are_cancelled_and_expire_as_those_of_the_queue_do() -> None:
    simulation = Simulation(SETTINGS, limits=TWO_ROWS)
    for rid in range(2):
        simulation.arrive(0.0, submit(rid, tokens=100))
    simulation.arrive(0.1, submit(2, deadline=0.3))
    simulation.arrive(0.1, submit(3))
    simulation.cancel(0.2, 3)
    simulation.run()
    assert simulation.outcomes[2].ends == ["deadline_exceeded"]
    assert simulation.outcomes[2].ended == pytest.approx(0.3)
    assert [simulation.outcomes[rid].placed for rid in (2, 3)] == [[], []]
