import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling.row_sampler import kept_tokens
from tests.runtime.sampling import reference

# Spread like logits: up to 40 below the likeliest, so that every search path is taken.
scores_strategy = hnp.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.one_of(st.floats(-40, 0, width=32), st.floats(-5, -3.5, width=32), st.just(-1.0)),
).map(lambda scores: scores - scores.max())


def kept(scores: np.ndarray, **settings: float) -> list[int]:
    params = RequestOptions(temperature=1.0, **settings)  # type: ignore[arg-type] # field names
    found = kept_tokens(scores.astype(np.float32), params)
    return list(range(scores.size)) if found is None else found.tolist()


@settings(deadline=None)
@given(scores_strategy, st.integers(1, 250))
def test_top_k_keeps_the_head_of_the_ranking(scores: np.ndarray, top_k: int) -> None:
    expected = reference.ranked(scores.tolist())[:top_k]
    assert kept(scores, top_k=top_k) == sorted(expected)


def near(mass: float, wanted: float) -> bool:
    return math.isclose(mass, wanted, rel_tol=1e-5)


@settings(deadline=None)
@given(scores_strategy, st.floats(0.001, 0.999), st.integers(0, 250))
def test_top_p_keeps_the_shortest_head_that_reaches_p(
    scores: np.ndarray, top_p: float, top_k: int
) -> None:
    weights = [math.exp(score) for score in scores.tolist()]
    order = reference.ranked(scores.tolist())[: top_k or None]
    expected = reference.nucleus(order, weights, top_p)
    total = sum(weights[i] for i in order)
    mass = np.cumsum([weights[i] for i in order]) / total
    # Where a border lies within rounding of p, either side of it is right.
    assume(not any(near(float(part), top_p) for part in mass))
    assert kept(scores, top_p=top_p, top_k=top_k) == sorted(expected)


@settings(deadline=None)
@given(scores_strategy, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_likely_beside_the_likeliest(scores: np.ndarray, min_p: float) -> None:
    weights = [math.exp(score) for score in scores.tolist()]
    assume(not any(near(weight, min_p) and weight < 1 for weight in weights))
    expected = [i for i, weight in enumerate(weights) if weight >= min_p]
    assert kept(scores, min_p=min_p) == expected


@settings(deadline=None)
@given(scores_strategy, st.integers(0, 9), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_the_likeliest_token_always_passes(
    scores: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    assert int(scores.argmax()) in kept(scores, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize(("scale", "top_p"), [(3.0, 0.5), (1.0, 0.9), (0.01, 0.99)])
def test_top_p_over_a_large_vocabulary(scale: float, top_p: float) -> None:
    scores = np.random.default_rng(1).standard_normal(20_000).astype(np.float32) * scale
    scores -= scores.max()
    weights = np.exp(scores.astype(np.float64))
    order = np.array(reference.ranked(scores.tolist()))
    mass = np.cumsum(weights[order]) / weights.sum()
    found = kept(scores, top_p=top_p)
    assert found == sorted(order[: len(found)].tolist())
    assert mass[len(found) - 2] < top_p + 1e-6
    assert mass[len(found) - 1] > top_p - 1e-6


def test_filters_that_are_off_keep_everything() -> None:
    scores = np.zeros(5, np.float32)
    assert kept_tokens(scores, RequestOptions(temperature=1.0)) is None
    assert kept_tokens(scores, RequestOptions(temperature=1.0, top_k=5)) is None


def test_min_p_is_measured_after_top_k() -> None:
    scores = np.log(np.array([0.1, 0.5, 0.3, 0.1], np.float32) / 0.5)
    assert kept(scores, top_k=2, min_p=0.7) == [1]
    assert kept(scores, top_k=3, min_p=0.5) == [1, 2]


def test_top_p_is_measured_on_what_top_k_kept() -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32) / 0.4)
    assert kept(scores, top_p=0.6) == [0, 1]
    # Of the two that top-k leaves, the first alone holds 4/7, which is less than 0.6.
    assert kept(scores, top_k=2, top_p=0.57) == [0]
