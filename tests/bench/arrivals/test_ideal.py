import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.bench.arrivals.ideal import Ask, Calls, first_come, in_turn

CALLS = Calls(decode_s=1.0, prefill_s=2.0)
ASKS = st.lists(
    # Quarters of a second, so that sums are exact.
    st.builds(Ask, st.integers(0, 200).map(lambda n: n / 4), st.just(1), st.integers(1, 12)),
    max_size=30,
).map(lambda asks: sorted(asks, key=lambda ask: ask.at))


def times(*asks: Ask, calls: Calls = CALLS, places: int = 8) -> list[list[float]]:
    return [row.times for row in first_come(asks, calls, places)]


def test_a_request_alone_has_its_prefill_and_then_a_token_each_step() -> None:
    (row,) = first_come([Ask(5.0, 10, 3)], CALLS, 8)
    assert row.times == [7.0, 8.0, 9.0]
    assert row.ttft == 2.0


def test_who_comes_in_a_step_waits_for_its_end_and_those_who_run_for_one_prefill() -> None:
    # 0 to 2 prefill, 2 to 3 decode; the second comes at 2.5: 3 to 5 its prefill, then both decode.
    assert times(Ask(0.0, 10, 4), Ask(2.5, 10, 2)) == [[2.0, 3.0, 6.0, 7.0], [5.0, 6.0]]


def test_those_who_wait_together_share_a_prefill_that_costs_by_all_their_tokens() -> None:
    calls = Calls(decode_s=1.0, prefill_s=1.0, prefill_token_s=0.1)
    assert times(Ask(0.0, 10, 2), Ask(0.0, 20, 1), calls=calls) == [[4.0, 5.0], [4.0]]


def test_prefills_take_turns_with_the_steps_of_those_who_run() -> None:
    # The second comes in the first one's prefill: a step of the first one goes before its own.
    assert times(Ask(0.0, 1, 3), Ask(1.0, 1, 1)) == [[2.0, 3.0, 6.0], [5.0]]


def test_nobody_waits_for_a_step_that_has_no_rows() -> None:
    assert times(Ask(0.0, 1, 1), Ask(1.0, 1, 1)) == [[2.0], [4.0]]


def test_a_place_goes_to_the_first_who_waits_at_the_very_border_where_it_frees() -> None:
    # One place: 0 to 2 prefill, step to 3; then the second, 3 to 5; then the third.
    rows = times(Ask(0.0, 1, 2), Ask(0.5, 1, 1), Ask(0.6, 1, 1), places=1)
    assert rows == [[2.0, 3.0], [5.0], [7.0]]


def test_an_idle_house_waits_for_the_next_request() -> None:
    assert times(Ask(0.0, 1, 1), Ask(10.0, 1, 1)) == [[2.0], [12.0]]


def test_clients_in_turn_send_the_next_request_when_one_has_ended() -> None:
    # One place, two clients, requests of one token: each prefill frees the place for the next.
    served = in_turn([Ask(0.0, 1, 1), Ask(0.0, 7, 1)], CALLS, 1, clients=2, seconds=5.0)
    assert [(row.ask.at, row.ask.prompt_tokens, row.times) for row in served] == [
        (0.0, 1, [2.0]),
        (0.0, 7, [4.0]),
        (2.0, 1, [6.0]),
        (4.0, 7, [8.0]),
    ]


@given(asks=ASKS, places=st.integers(1, 8))
def test_everyone_is_served_whole_in_the_order_of_coming_and_never_too_many_at_once(
    asks: list[Ask], places: int
) -> None:
    served = first_come(asks, CALLS, places)
    assert [row.ask for row in served] == asks
    assert [len(row.times) for row in served] == [ask.tokens for ask in asks]
    firsts = [row.times[0] for row in served]
    assert firsts == sorted(firsts)
    for row in served:
        assert row.ttft >= CALLS.prefill_s
        assert row.times == sorted(set(row.times))
    steps = sorted({end for row in served for end in row.times})
    for end in steps:
        assert sum(row.times[0] <= end <= row.times[-1] for row in served) <= places
    if asks:
        busy = sum(ask.tokens - 1 for ask in asks) + CALLS.prefill_s * len(asks)
        assert steps[-1] <= asks[-1].at + busy + CALLS.prefill_s


def test_a_full_house_is_limited_by_its_places_alone() -> None:
    served = first_come([Ask(0.0, 1, 100)] * 16, Calls(0.01, 0.01), 8)
    assert served[-1].times[-1] == pytest.approx(2 * 100 * 0.01)
