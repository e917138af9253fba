import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling.row_sampler import draw, invert, tempered, uniforms
from tests.runtime.sampling import reference

weights_strategy = hnp.arrays(
    np.float32,
    st.sampled_from([1, 2, 5, 40, 1023, 1024, 1025, 3000]),
    elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    fill=st.just(0.0),
).filter(lambda weights: weights.any())


@settings(deadline=None)
@given(weights_strategy, st.floats(0, 1, exclude_max=True))
def test_invert_is_the_first_index_above_the_target(weights: np.ndarray, uniform: float) -> None:
    target = uniform * float(weights.sum())
    expected = next(i for i, mass in enumerate(np.cumsum(weights).tolist()) if mass > target)
    # These weights add up exactly, so that any order of summation agrees.
    assert invert(weights, uniform) == expected


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 2500), elements=st.floats(0, 1, width=32)).filter(
        lambda weights: weights.any()
    )
)
def test_the_largest_uniform_number_still_hits_a_token_with_weight(weights: np.ndarray) -> None:
    assert weights[invert(weights, math.nextafter(1.0, 0.0))] > 0
    assert weights[invert(weights, 0.0)] > 0


def test_tempered_scores_end_at_zero() -> None:
    scores = np.array([1, 3, -5], np.float32)
    assert tempered(scores, 3.0, 0.5).tolist() == [-4.0, 0.0, -16.0]


def test_a_tiny_temperature_leaves_only_the_highest_score() -> None:
    scores = np.array([1, 3, 3, -5], np.float32)
    with np.errstate(over="ignore"):
        relative = tempered(scores, 3.0, 1e-300)
    params = RequestOptions(temperature=1e-300)
    assert {draw(relative, params, u) for u in (0.0, 0.3, 0.7, 0.99)} == {1, 2}


@pytest.mark.parametrize(
    "params",
    [
        RequestOptions(temperature=1.0),
        RequestOptions(temperature=0.6, top_k=7),
        RequestOptions(temperature=1.3, top_p=0.85),
        RequestOptions(temperature=1.0, min_p=0.1),
        RequestOptions(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_filtered_distribution(params: RequestOptions) -> None:
    logits = np.random.default_rng(5).standard_normal(40).astype(np.float32) * 2
    expected = reference.distribution(logits.tolist(), params)
    relative = tempered(logits, float(logits.max()), params.temperature)
    count = 8000
    drawn = [draw(relative, params, u) for u in uniforms(11, 0, count).tolist()]
    assert set(drawn) <= set(expected)
    groups = [(drawn.count(i), probability * count) for i, probability in expected.items()]
    rare = [group for group in groups if group[1] < 5]
    groups = [group for group in groups if group[1] >= 5]
    groups.append((sum(seen for seen, _ in rare), sum(wanted for _, wanted in rare) + 1e-9))
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups)
    # Mean plus five standard deviations of a chi-square variable.
    degrees = len(groups) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)
