import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling import RowSampler, Sample, sample_rows, walk_tree

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
    assert found == [Sample(20), Sample(0)]


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
    assert plain == Sample(plain.token_id)
    assert len(with_logprobs.top) == 3


def test_views_that_are_not_contiguous_are_read_right() -> None:
    wide = np.zeros((2, 3 * VOCAB), np.float32)
    wide[:, ::3] = make_logits(2)
    params = [PARAMS[1], PARAMS[3]]
    found = sample_rows(wide[:, ::3], samplers(params), [5, 5])
    assert found == sample_rows(make_logits(2), samplers(params), [5, 5])


def mask_of(allowed: list[int]) -> NDArray[np.uint32]:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
    bits[allowed] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True), st.integers(0, 500))
def test_a_mask_allows_no_other_token_and_keeps_probabilities(
    allowed: list[int], position: int
) -> None:
    logits = make_logits(len(PARAMS))
    masked = sample_rows(
        logits, samplers(PARAMS), [position] * len(PARAMS), [mask_of(allowed)] * len(PARAMS)
    )
    for row, (params, sample) in enumerate(zip(PARAMS, masked, strict=True)):
        assert sample is not None
        assert sample.token_id in allowed
        # As if the logits of other tokens were as low as they can be, but for what is reported.
        low = np.full(VOCAB, np.finfo(np.float32).min / 8, np.float32)
        low[allowed] = logits[row, allowed]
        (wanted,) = sample_rows(low[None], samplers([params]), [position])
        assert wanted is not None
        assert sample.token_id == wanted.token_id
        if params.logprobs is not None:
            (free,) = sample_rows(logits[row : row + 1], samplers([params]), [position])
            assert free is not None
            assert sample.top == free.top


def test_a_mask_is_for_its_row_alone() -> None:
    logits = make_logits(len(PARAMS))
    free = sample_rows(logits, samplers(PARAMS), [7] * len(PARAMS))
    for row in range(len(PARAMS)):
        masks = [mask_of([5]) if i == row else None for i in range(len(PARAMS))]
        found = sample_rows(logits, samplers(PARAMS), [7] * len(PARAMS), masks)
        assert found[row] != free[row]
        assert [*found[:row], *found[row + 1 :]] == [*free[:row], *free[row + 1 :]]


def test_a_mask_that_allows_nothing_leaves_no_score() -> None:
    found = sample_rows(make_logits(2), samplers(PARAMS[:2]), [3, 3], [mask_of([])] * 2)
    assert found == [None, None]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_are_found_not_to_be_finite_behind_a_mask(bad: float) -> None:
    logits = make_logits(1)
    logits[0, 9] = bad
    assert sample_rows(logits, samplers(PARAMS[:1]), [3], [mask_of([5])]) == [None]


def test_a_walk_with_masks_ends_before_a_node_without_one() -> None:
    logits = make_logits(3)
    logits[:, 5] = 50
    keys = [0, (0 << 32) + 5, (1 << 32) + 5]
    walks = [
        walk_tree(logits, keys, samplers(PARAMS[:1])[0], 3, masks)
        for masks in ([], [mask_of([5])], [mask_of([5]), mask_of([6])], [mask_of([6])] * 3)
    ]
    assert [walk and [sample.token_id for sample in walk[0]] for walk in walks] == [
        [5, 5, 5],
        [5],
        [5, 6],
        [6],
    ]
