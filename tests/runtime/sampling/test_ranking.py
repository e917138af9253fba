import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hearth.runtime.sampling.ranking import leading, ranked
from tests.runtime.sampling import reference

floats = st.floats(-(2.0**100), 2.0**100, width=32)
# Few distinct values, so that ties are common.
tied = st.sampled_from([-np.inf, -2.5, -1.0, -0.0, 0.0, 1.0, 1.0000001, 3.0])
scores_strategy = hnp.arrays(np.float32, st.integers(1, 60), elements=st.one_of(floats, tied))


@settings(deadline=None)
@given(scores_strategy)
def test_ranked_orders_by_score_then_id(scores: np.ndarray) -> None:
    found = ranked(scores, np.arange(scores.size))
    assert found.tolist() == reference.ranked(scores.tolist())


@settings(deadline=None)
@given(scores_strategy, st.integers(1, 80))
def test_leading_is_the_head_of_the_ranking(scores: np.ndarray, count: int) -> None:
    assert leading(scores, count).tolist() == reference.ranked(scores.tolist())[:count]


def test_ids_are_those_given() -> None:
    scores = np.array([1, 2, 1], np.float32)
    assert ranked(scores, np.array([7, 3, 5])).tolist() == [3, 5, 7]


def test_zeros_of_both_signs_are_equal() -> None:
    assert ranked(np.array([-0.0, 0.0, -0.0], np.float32), np.arange(3)).tolist() == [0, 1, 2]


def test_inputs_stay_as_they_were() -> None:
    scores = np.array([3, -1, 2], np.float32)
    leading(scores, 2)
    assert scores.tolist() == [3, -1, 2]
