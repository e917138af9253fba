"""However one client floods, another's first token waits for the hold limit and its own prefill."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from hearth.actors.scheduler.fair_share import FIRST_PLACE_S
from hearth.actors.scheduler.request_state import RequestStatus
from hearth.actors.settings import PolicySettings
from tests.actors.simulation import LIMITS, Simulation, submit

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
