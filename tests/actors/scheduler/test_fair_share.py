"""Clients share places and waiting time, however much one of them asks."""

from __future__ import annotations

import itertools
import random
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from hearth.actors.scheduler.fair_share import FIRST_PLACE_S
from hearth.actors.scheduler.request_state import RequestStatus
from hearth.actors.settings import PolicySettings
from tests.actors.scheduler.simulation import LIMITS, Simulation, submit

STEP_S = 0.01
CHUNK_S = 0.02
PREFILL_S = 0.0005
"""Of a token."""


LAG_S = 0.002
FLOOD = 1
FLOODS: dict[str, dict[str, Any]] = {
    "many short ones": {"prompt": 10, "tokens": 20},
    "long prompts": {"prompt": 3000, "tokens": 20},
    "long replies": {"prompt": 10, "tokens": 3000},
    "long prompts and replies": {"prompt": 3000, "tokens": 3000},
    "of a high priority": {"prompt": 10, "tokens": 500, "priority": 10},
    "long prompts of a high priority": {"prompt": 3000, "tokens": 500, "priority": 10},
}


def flooded(
    batching: Literal["joining", "synchronous"], flood: dict[str, Any], places: int
) -> Simulation:
    """One client has sent 40 requests at once and goes on to send more."""
    settings = PolicySettings(batching=batching, queue_tokens=1 << 20, client_queue_share=1.0)
    simulation = Simulation(
        settings,
        limits=msgspec.structs.replace(LIMITS, max_batch=places),
        step_s=STEP_S,
        prefill_s_per_token=PREFILL_S,
        chunk_s=CHUNK_S,
        lag_s=LAG_S,
    )
    for rid in range(40):
        simulation.arrive(0.0, submit(rid, client=FLOOD, **flood))
    for number in range(30):
        simulation.arrive(0.3 * number, submit(200 + number, client=FLOOD, **flood))
    return simulation


def check(simulation: Simulation, asked: dict[int, int], places: int) -> None:
    """A place after the hold limit, and a token after the prompt has been read.

    Prompts are read in turns with steps of those that decode, and behind those of the other places
    of which less is left.
    """
    for rid, prompt in asked.items():
        outcome = simulation.outcomes[rid]
        assert outcome.placed[0] - outcome.submitted <= FIRST_PLACE_S + 2 * (CHUNK_S + STEP_S)
        reads = places * prompt * PREFILL_S
        assert outcome.wait <= FIRST_PLACE_S + reads + (reads / CHUNK_S + 1) * STEP_S + 3 * CHUNK_S


@pytest.mark.parametrize("places", [1, 2, 8])
@pytest.mark.parametrize("name", FLOODS)
def test_rows_that_join_wait_for_the_hold_limit_and_their_own_prefill(
    name: str, places: int
) -> None:
    simulation = flooded("joining", FLOODS[name], places)
    asked = {1000 + one: prompt for one, prompt in enumerate((10, 200, 400))}
    for rid, prompt in asked.items():
        simulation.arrive(
            1.7 + 2.3 * (rid - 1000), submit(rid, prompt=prompt, client=rid, tokens=30)
        )
    simulation.run(until=9.0)
    check(simulation, asked, places)
    # The client that floods is served beside it.
    mine = sum(len(one.tokens) for rid, one in simulation.outcomes.items() if rid < 400)
    assert mine >= 10


@pytest.mark.parametrize("name", FLOODS)
def test_a_synchronous_batch_gives_way_after_the_hold_limit(name: str) -> None:
    simulation = flooded("synchronous", FLOODS[name], 8)
    asked = {1000 + one: prompt for one, prompt in enumerate((10, 200, 400))}
    for rid, prompt in asked.items():
        simulation.arrive(
            1.7 + 2.3 * (rid - 1000), submit(rid, prompt=prompt, client=rid, tokens=30)
        )
    simulation.run(until=9.0)
    check(simulation, asked, 8)


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
def test_a_request_gives_way_once_and_then_gets_its_tokens(
    batching: Literal["joining", "synchronous"],
) -> None:
    """With one place, and others that come again and again, whoever has long prompts ends too."""
    settings = PolicySettings(batching=batching, queue_tokens=1 << 20)
    simulation = Simulation(
        settings,
        limits=msgspec.structs.replace(LIMITS, max_batch=1),
        prefill_s_per_token=PREFILL_S,
        chunk_s=CHUNK_S,
    )
    for rid in range(5):
        simulation.arrive(0.0, submit(rid, client=FLOOD, prompt=3000, tokens=20))
    for number in range(50):
        simulation.arrive(0.9 * number, submit(1000 + number, client=2 + number, tokens=5))
    simulation.run(until=40.0)
    assert sum(simulation.outcomes[rid].ends == ["done"] for rid in range(5)) >= 3


def test_who_asks_for_as_much_as_the_others_takes_no_place_that_is_not_paid() -> None:
    simulation = flooded("joining", FLOODS["long prompts"], 8)
    for rid in range(1000, 1100):
        simulation.arrive(0.5, submit(rid, client=2, prompt=3000, tokens=20))
    simulation.run(until=8.0)
    at_once = RequestStatus.PREEMPTING_AT_ONCE
    assert not any(one.status is at_once for one in simulation.policy._running)
    assert not any(entry.gave_way for entry in simulation.policy._queue if entry.client == 2)


def test_who_can_wait_does() -> None:
    """A priority below 0 is for what has time: it takes no place before its turn."""
    simulation = flooded("joining", FLOODS["long prompts"], 8)
    simulation.arrive(1.7, submit(1000, client=2, tokens=30, priority=-1))
    simulation.run(until=9.0)
    assert not any(entry.gave_way for entry in simulation.policy._queue)


SETTINGS = PolicySettings(queue_requests=4096, queue_tokens=1 << 20, client_queue_share=1.0)
FIRST_TOKEN_S = 2.0
LIGHT = 99


def simulation(places: int = 8, settings: PolicySettings = SETTINGS) -> Simulation:
    """Prompts are read in pieces, in turns with decode steps."""
    return Simulation(
        settings,
        limits=msgspec.structs.replace(LIMITS, max_batch=places),
        step_s=STEP_S,
        prefill_s_per_token=0.00013,
        chunk_s=0.02,
        lag_s=0.001,
    )


def poisson(clients: int, seed: int, load: float = 0.85, seconds: float = 45.0) -> Simulation:
    """Random requests of clients of equal demand, at that share of what eight places give."""
    made, rng = simulation(), random.Random(seed)
    count = round(load * 8 * seconds)
    for rid, at in enumerate(sorted(rng.uniform(0, seconds) for _ in range(count))):
        prompt, tokens = rng.randint(5, 150), rng.randint(20, 180)
        client = rng.randrange(64) % clients
        made.arrive(1 + at, submit(rid, prompt=prompt, tokens=tokens, client=client))
    made.run()
    return made


def gaps(made: Simulation) -> list[float]:
    """The longest time between two tokens of each reply."""
    return [
        max((b - a for a, b in itertools.pairwise(one.tokens)), default=0.0)
        for one in made.outcomes.values()
    ]


@pytest.mark.parametrize(("clients", "seed"), [(8, 0), (8, 1), (8, 2), (3, 1), (2, 2)])
def test_their_tails_are_those_of_first_come_first_served(clients: int, seed: int) -> None:
    some, ideal = poisson(clients, seed), poisson(1, seed)

    def times(made: Simulation) -> tuple[float, float, float]:
        first = [one.wait for one in made.outcomes.values()]
        whole = [(one.ended or 0.0) - one.submitted for one in made.outcomes.values()]
        return float(np.percentile(first, 99)), float(np.percentile(whole, 99)), max(whole)

    for got, wanted in zip(times(some), times(ideal), strict=True):
        assert got <= 1.3 * wanted
    assert max(gaps(some)) <= 1.0


@pytest.mark.parametrize("places", [1, 2, 8])
@pytest.mark.parametrize("heavy", [1, 3])
def test_a_newcomer_has_its_first_token_beside_long_replies_of_others(
    heavy: int, places: int
) -> None:
    made = simulation(places)
    for rid in range(8 * heavy):
        made.arrive(rid / 1000, submit(rid, tokens=2000, client=rid % heavy))
    for number in range(5):
        made.arrive(0.5 + 4 * number, submit(1000 + number, tokens=30, client=LIGHT))
    made.run(until=25.0)
    assert all(made.outcomes[1000 + number].wait <= FIRST_TOKEN_S for number in range(5))
    # Who gave way goes on before others that wait.
    assert max(gaps(made)) <= 30 * STEP_S * places + 1.0


def test_a_newcomer_waits_for_one_place_beside_a_flood_of_short_ones() -> None:
    made = simulation()
    for rid in range(200):
        made.arrive(0.0, submit(rid, tokens=50 + rid % 50, client=rid % 3))
    for number in range(10):
        made.arrive(3.0 + number / 2, submit(1000 + number, tokens=30, client=LIGHT))
    made.run(until=9.0)
    waits = [made.outcomes[1000 + number].wait for number in range(10)]
    assert max(waits) < 0.5
    assert made.policy.report(0).requeued == 0


def test_of_two_that_ask_for_too_much_the_first_to_come_does_not_keep_all_places() -> None:
    made = simulation()
    for rid in range(400):
        made.arrive(0.0, submit(rid, tokens=50, client=1))
        made.arrive(5.0, submit(1000 + rid, tokens=50, client=2))
    made.run(until=25.0)
    served = sum(len(made.outcomes[1000 + rid].tokens) for rid in range(400))
    # Of twenty seconds, in which eight places give 800 tokens each less their prefills.
    assert 0.2 * 16000 <= served <= 0.6 * 16000


def test_equal_clients_with_a_long_reply_each_do_not_take_places_from_each_other() -> None:
    made = simulation(2)
    for rid in range(3):
        made.arrive(rid / 100, submit(rid, tokens=500, client=rid))
    made.run()
    assert max(gaps(made)) < 0.1
    assert made.policy.report(0).requeued == 0


def test_a_reply_that_made_room_for_a_higher_priority_goes_on_before_its_equals() -> None:
    made = simulation(1)
    made.arrive(0.0, submit(1, tokens=200, client=1))
    made.arrive(0.1, submit(2, tokens=200, client=2))
    made.arrive(0.5, submit(3, tokens=20, client=3, priority=1))
    made.run()
    assert made.batches == [[1], [3], [1], [2]]


def test_after_the_hold_limit_others_come_first() -> None:
    made = simulation(1, msgspec.structs.replace(SETTINGS, hold_s=1.0))
    for rid in (1, 2):
        made.arrive(rid / 10, submit(rid, tokens=150, client=rid))
    made.run()
    assert made.batches == [[1], [2], [1], [2]]


def test_a_first_place_leaves_time_for_a_prompt() -> None:
    assert FIRST_PLACE_S < FIRST_TOKEN_S
