from __future__ import annotations

import msgspec

from hearth.actors.settings import PolicySettings
from tests.actors.simulation import LIMITS, Simulation, submit

SETTINGS = PolicySettings(batching="synchronous")


def test_a_batch_keeps_the_rows_that_it_began_with() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=50))
    simulation.arrive(0.05, submit(2))
    simulation.run()
    assert simulation.batches == [[1], [2]]


def test_a_free_executor_lets_the_next_batch_fill_although_one_has_waited() -> None:
    simulation = Simulation(SETTINGS, step_s=0.002)
    simulation.arrive(0.0, submit(1, tokens=50))
    simulation.arrive(0.05, submit(2))
    simulation.run(until=0.1)
    simulation.arrive(0.1055 + 0.003, submit(3))  # as it ends at 0.105
    simulation.run()
    assert simulation.batches == [[1], [2, 3]]


def test_after_a_release_nobody_waits_again() -> None:
    settings = msgspec.structs.replace(SETTINGS, hold_s=0.5, fill_wait_ms=100.0)
    simulation = Simulation(settings)
    simulation.arrive(0.0, submit(1, tokens=100))
    simulation.arrive(0.2, submit(2))
    simulation.run()
    assert simulation.batches == [[1], [2, 1], [1]]
    assert simulation.outcomes[2].wait < 0.5 + 0.1 - 0.2 + 0.03


def test_a_full_batch_whose_rows_have_ended_is_released_like_any_other() -> None:
    limits = msgspec.structs.replace(LIMITS, max_batch=2)
    simulation = Simulation(SETTINGS, limits=limits)
    for rid, tokens in ((1, 3000), (2, 20)):
        simulation.arrive(0.0, submit(rid, tokens=tokens, priority=10))
    simulation.arrive(0.1, submit(3))
    simulation.run()
    assert simulation.outcomes[3].wait < SETTINGS.hold_s + 0.1
    assert simulation.outcomes[1].ends == ["done"]


def test_a_high_priority_request_waits_one_batch_at_most() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(200):
        simulation.arrive(rid * 0.001, submit(rid, tokens=64, priority=0))
    for urgent in range(1000, 1010):
        simulation.arrive((urgent - 999) * 0.7, submit(urgent, priority=5))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1000, 1010)]
    assert max(waits) <= 64 * 0.01 + SETTINGS.fill_wait_s + 0.02
