from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stream_check import Tally

TRUTH = [7, 3, 3, 9, 12, 5, 7, 1]
STREAMS = st.lists(st.integers(0, 6), max_size=30)


def tally(received: Sequence[int], expected: Sequence[int] = TRUTH) -> Tally:
    found = Tally()
    found.check(expected, received)
    return found


def faults(found: Tally) -> tuple[int, int, int]:
    return found.lost, found.doubled, found.disordered


def test_a_true_stream_is_clean() -> None:
    found = tally(TRUTH)
    assert found.clean
    assert (found.requests, found.tokens) == (1, 8)


@pytest.mark.parametrize("index", range(len(TRUTH)))
def test_one_dropped_token_is_one_lost(index: int) -> None:
    assert faults(tally(TRUTH[:index] + TRUTH[index + 1 :])) == (1, 0, 0)


@pytest.mark.parametrize("index", range(len(TRUTH)))
def test_one_repeated_token_is_one_doubled(index: int) -> None:
    assert faults(tally(TRUTH[: index + 1] + TRUTH[index:])) == (0, 1, 0)


def test_two_swapped_tokens_are_one_disordered() -> None:
    assert faults(tally([3, 7, *TRUTH[2:]])) == (0, 0, 1)


def test_all_three_at_once_are_told_apart() -> None:
    assert faults(tally([3, 7, 3, 9, 9, 12, 5, 7])) == (1, 1, 1)


def test_a_wrong_token_is_one_lost_and_one_doubled() -> None:
    assert faults(tally([*TRUTH[:-1], 99])) == (1, 1, 0)


@given(expected=STREAMS, received=STREAMS)
def test_only_equal_streams_are_clean(expected: list[int], received: list[int]) -> None:
    found = tally(received, expected)
    assert found.clean is (expected == received)
    assert min(faults(found)) >= 0


@given(expected=STREAMS, data=st.data())
def test_a_reordered_stream_loses_nothing(expected: list[int], data: st.DataObject) -> None:
    found = tally(data.draw(st.permutations(expected)), expected)
    assert (found.lost, found.doubled) == (0, 0)


def test_tallies_add_up() -> None:
    total = tally(TRUTH)
    total.add(tally(TRUTH[1:]))
    total.add(Tally(failed=1, misended=2))
    assert msgspec.structs.asdict(total) == {
        "requests": 2,
        "tokens": 15,
        "lost": 1,
        "doubled": 0,
        "disordered": 0,
        "failed": 1,
        "misended": 2,
    }
    assert not Tally(misended=1).clean
