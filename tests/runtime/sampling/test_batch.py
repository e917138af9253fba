import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.request import NO_ROW, RequestOptions, RowToken
from hearth.runtime.sampling import RowSampler, sample_rows

VOCAB = 64
PARAMS = [
    RequestOptions(),
    RequestOptions(temperature=1.0, seed=1),
    RequestOptions(temperature=1.0, seed=1, logprobs=3),
    RequestOptions(temperature=0.7, top_k=5, seed=9),
    RequestOptions(temperature=1.2, top_p=0.8, min_p=0.05, seed=3),
    RequestOptions(repetition_penalty=1.5, presence_penalty=0.5, logprobs=0),
]


def make_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * 3


def samplers(params: list[RequestOptions]) -> list[RowSampler]:
    return [RowSampler(p, [1, 2, 3], 2, VOCAB) for p in params]


@settings(deadline=None)
@given(st.permutations(range(len(PARAMS))), st.integers(1, len(PARAMS)), st.integers(0, 500))
def test_a_row_does_not_depend_on_its_neighbours(
    order: list[int], size: int, position: int
) -> None:
    logits = make_logits(len(PARAMS))
    chosen = order[:size]
    together = sample_rows(logits[chosen], samplers([PARAMS[i] for i in chosen]), [position] * size)
    alone = [sample_rows(logits[i : i + 1], samplers([PARAMS[i]]), [position])[0] for i in chosen]
    assert together == alone


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 17, VOCAB - 1])
def test_a_row_that_is_not_finite_is_alone_in_failing(bad: float, column: int) -> None:
    logits = make_logits(len(PARAMS))
    expected = sample_rows(logits, samplers(PARAMS), [3] * len(PARAMS))
    assert None not in expected
    for row in range(len(PARAMS)):
        poisoned = logits.copy()
        poisoned[row, column] = bad
        found = sample_rows(poisoned, samplers(PARAMS), [3] * len(PARAMS))
        assert found == [None if i == row else sample for i, sample in enumerate(expected)]


def test_mixed_infinities_and_nan_are_not_finite() -> None:
    logits = make_logits(1)
    logits[0, :3] = [np.inf, -np.inf, np.nan]
    assert sample_rows(logits, samplers([RequestOptions()]), [0]) == [None]


def test_greedy_takes_the_lowest_id_of_the_highest_logits() -> None:
    logits = make_logits(2)
    logits[0, [50, 20, 60]] = 99
    logits[1, [63, 0]] = 99
    found = sample_rows(logits, samplers([RequestOptions()] * 2), [0, 0])
    assert found == [RowToken(NO_ROW, 20), RowToken(NO_ROW, 0)]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    params = RequestOptions(
        temperature=0.3, top_k=1, logit_bias=((11, 100.0),), repetition_penalty=3.0, logprobs=2
    )
    logits = make_logits(1)
    (sample,) = sample_rows(logits, samplers([params]), [0])
    exact = logits[0].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert sample is not None
    assert sample.token_id == 11
    assert sample.logprob == pytest.approx(exact[11], abs=1e-5)
    best = np.argsort(-exact)[:2]
    assert [entry.token_id for entry in sample.top] == best.tolist()
    assert [entry.logprob for entry in sample.top] == pytest.approx(exact[best], abs=1e-5)


def test_logprobs_do_not_change_the_choice_and_are_absent_unless_asked() -> None:
    logits = make_logits(2)
    logits[1] = logits[0]
    plain, with_logprobs = sample_rows(logits, samplers(PARAMS[1:3]), [7, 7])
    assert plain is not None
    assert with_logprobs is not None
    assert plain.token_id == with_logprobs.token_id
    assert plain == RowToken(NO_ROW, plain.token_id)
    assert len(with_logprobs.top) == 3


def test_views_that_are_not_contiguous_are_read_right() -> None:
    wide = np.zeros((2, 3 * VOCAB), np.float32)
    wide[:, ::3] = make_logits(2)
    params = [PARAMS[1], PARAMS[3]]
    found = sample_rows(wide[:, ::3], samplers(params), [5, 5])
    assert found == sample_rows(make_logits(2), samplers(params), [5, 5])
