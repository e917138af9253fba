"""Order of a fair queue by what messages cost, without a daemon."""

from collections import Counter
from collections.abc import Mapping

import pytest

from hearth.daemon.door.fair_queue import FairQueue

Flow = tuple[str, int]


def served(costs: Mapping[Flow, float], seconds: float) -> Counter[Flow]:
    """How many messages of each were taken, where all always have some that cost so much."""
    turns, taken, spent = FairQueue[Flow](), Counter[Flow](), 0.0
    for one in costs:
        turns.add(*one, one)
    while spent < seconds:
        flow = turns.take()
        assert flow is not None
        turns.add(*flow, flow)
        turns.charge(*flow, costs[flow])
        taken[flow] += 1
        spent += costs[flow]
    return taken


@pytest.mark.parametrize(
    ("costs", "shares"),
    [
        # Time is shared, whatever a message costs.
        ({("a", 1): 0.02, ("b", 2): 0.001}, [0.5, 0.5]),
        # A peer gets no more for having more connections.
        (
            {("a", 1): 0.001, ("b", 2): 0.001, ("b", 3): 0.001, ("b", 4): 0.003},
            [1 / 2, *[1 / 6] * 3],
        ),
        ({("a", 1): 0.02, ("a", 2): 0.001}, [0.5, 0.5]),
    ],
)
def test_time_is_shared_by_peers_and_then_by_connections(
    costs: dict[Flow, float], shares: list[float]
) -> None:
    taken = served(costs, 10.0)
    assert [taken[flow] * cost / 10.0 for flow, cost in costs.items()] == pytest.approx(
        shares, abs=0.01
    )


def test_connections_that_come_anew_each_time_do_not_starve_one_that_stays() -> None:
    turns, taken = FairQueue[int](), Counter[bool]()
    turns.add("a", 0, 0)
    for number in range(1, 1001):
        turns.add("a", number, number)
        one = turns.take()
        assert one is not None
        turns.charge("a", one, 0.001)
        if one == 0:
            turns.add("a", 0, 0)
        taken[one == 0] += 1
    # Each that comes makes the wait one turn longer.
    assert taken[True] > 8


def test_messages_of_one_connection_keep_their_order() -> None:
    turns = FairQueue[int]()
    for number in range(5):
        turns.add("a", 1, number)
    assert [turns.take() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert not turns


def test_a_pause_neither_cancels_a_debt_nor_earns_anything() -> None:
    turns = FairQueue[str]()
    turns.add("dear", 1, "dear")
    assert turns.take() == "dear"
    turns.charge("dear", 1, 0.02)
    # It has waited for nothing meanwhile, and still comes behind all that cost less.
    turns.add("dear", 1, "dear")
    taken = []
    for _ in range(30):
        turns.add("cheap", 2, "cheap")
        taken.append(one := turns.take())
        turns.charge(str(one), 1 if one == "dear" else 2, 0.001)
    assert taken.index("dear") == pytest.approx(20, abs=1)
    for _ in range(100):
        turns.add("dear", 1, "dear")
        turns.take()
        turns.charge("dear", 1, 0.02)
    # Nobody is owed the time in which he asked for nothing.
    for _ in range(2):
        turns.add("cheap", 2, "cheap")
        turns.add("dear", 1, "dear")
    taken = []
    while (one := turns.take()) is not None:
        taken.append(one)
        turns.charge(one, 1 if one == "dear" else 2, 0.02)
    assert Counter(taken[:2]) == {"cheap": 1, "dear": 1}


def test_what_is_remembered_has_a_bound() -> None:
    turns = FairQueue[str]()
    for number in range(5000):
        turns.add(f"peer {number % 1000}", number, "x")
        turns.take()
        turns.charge(f"peer {number % 1000}", number, 0.01)
        assert len(turns._connections) <= 300
        assert len(turns._peers._costs) <= 300
    for number in range(5000):
        turns.add("one", number, "x")
        turns.take()
        turns.charge("one", number, 0.01)
    assert len(turns._connections["one"]._costs) <= 300
