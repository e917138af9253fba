import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.reference.top_k import top_k
from tests.runtime.device.tree_reference import best

ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0]


def _reference(scores: np.ndarray, count: int) -> list[list[int]]:
    return [best(row, count) for row in scores.reshape(-1, scores.shape[-1]).tolist()]


def _check(scores: np.ndarray, count: int) -> None:
    found = top_k(scores, count)
    assert found.shape == (*scores.shape[:-1], count)
    assert found.reshape(-1, count).tolist() == _reference(scores, count)


@pytest.mark.parametrize("size", [1, 7, 127, 128, 129, 1000, 4099])
def test_the_best_are_found_among_few_and_many(size: int) -> None:
    scores = np.random.default_rng(size).normal(size=(2, 3, size)).astype(np.float32)
    for count in {1, min(4, size), min(60, size), min(300, size), size}:
        _check(scores, count)


@pytest.mark.parametrize("size", [40, 1100, 3000])
@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_equal_scores_rank_by_index(size: int, kinds: int) -> None:
    scores = np.random.default_rng(kinds).integers(kinds, size=(3, size)).astype(np.float32)
    for count in (1, 10, 40):
        _check(scores, count)


@given(
    st.integers(0, 10_000),
    st.sampled_from([20, 600, 2000]),
    st.integers(1, 20),
    st.sampled_from([0.01, 0.5, 1.0]),
)
def test_numbers_that_are_not_finite_have_their_place(
    seed: int, size: int, count: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(2, size)).astype(np.float32)
    odd = rng.random(scores.shape) < share
    scores[odd] = rng.choice(np.array(ODD, np.float32), size=int(odd.sum()))
    _check(scores, count)


def test_a_row_without_a_number_gives_its_first_indices() -> None:
    scores = np.full((2, 2000), np.nan, np.float32)
    scores[1, 1500] = -5
    assert top_k(scores, 3).tolist() == [[0, 1, 2], [1500, 0, 1]]


def test_scores_are_only_read() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 1500)).astype(np.float32)
    before = scores.copy()
    top_k(scores, 5)
    assert np.array_equal(scores, before)
