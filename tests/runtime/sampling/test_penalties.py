import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling.row_sampler import ScoreAdjustment, TokenCounts
from tests.runtime.sampling import reference

VOCAB = 30
ids = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def adjustment(params: RequestOptions, token_ids: list[int], prompt: int) -> ScoreAdjustment:
    return ScoreAdjustment(params, token_ids, token_ids[prompt:], VOCAB)


penalties = st.builds(
    RequestOptions,
    repetition_penalty=st.floats(0.5, 2.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
)


@settings(deadline=None)
@given(penalties, ids, st.integers(0, 60))
def test_scores_are_those_of_the_plain_implementation(
    params: RequestOptions, token_ids: list[int], prompt: int
) -> None:
    logits = np.linspace(-3, 3, VOCAB, dtype=np.float32)
    found = adjustment(params, token_ids, prompt).apply(logits)
    expected = reference.adjusted(logits.tolist(), params, token_ids, prompt)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_prompt_tokens_count_for_repetition_alone() -> None:
    logits = np.ones(VOCAB, np.float32)
    repeated = adjustment(RequestOptions(repetition_penalty=2.0), [3, 4], 1).apply(logits)
    assert (repeated[3], repeated[4], repeated[5]) == (0.5, 0.5, 1.0)
    present = adjustment(RequestOptions(presence_penalty=2.0), [3, 4, 4], 1).apply(logits)
    assert (present[3], present[4]) == (1.0, -1.0)
    frequent = adjustment(RequestOptions(frequency_penalty=2.0), [3, 4, 4], 1).apply(logits)
    assert (frequent[3], frequent[4]) == (1.0, -3.0)


def test_logits_stay_as_they_were() -> None:
    logits = np.ones(VOCAB, np.float32)
    adjustment(RequestOptions(logit_bias=((1, 5.0),)), [], 0).apply(logits)
    assert logits.tolist() == [1.0] * VOCAB


@pytest.mark.parametrize(
    ("params", "active"),
    [
        (RequestOptions(), False),
        (RequestOptions(temperature=2.0, top_k=3), False),
        (RequestOptions(repetition_penalty=1.1), True),
        (RequestOptions(presence_penalty=-0.1), True),
        (RequestOptions(frequency_penalty=0.1), True),
        (RequestOptions(logit_bias=((0, 0.0),)), True),
    ],
)
def test_active_says_whether_anything_changes(params: RequestOptions, *, active: bool) -> None:
    assert adjustment(params, [], 0).active is active


def test_ids_without_a_logit_are_left_out() -> None:
    rows = adjustment(RequestOptions(repetition_penalty=2.0), [VOCAB, 2, -1], 0)
    rows.accept(VOCAB + 7)
    changed = rows.apply(np.ones(VOCAB, np.float32))
    assert np.flatnonzero(changed != 1).tolist() == [2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=500))
def test_counts_are_those_of_the_list(token_ids: list[int]) -> None:
    counts = TokenCounts(token_ids)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {i: token_ids.count(i) for i in set(token_ids)}
