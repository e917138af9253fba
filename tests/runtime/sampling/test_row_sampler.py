import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling import RowSampler

VOCAB = 40


def pick(sampler: RowSampler, logits: np.ndarray, position: int) -> int | None:
    return sampler.pick(logits, int(logits.argmax()), position)


def step_logits(position: int) -> np.ndarray:
    return np.random.default_rng(position).standard_normal(VOCAB).astype(np.float32)


def generate(sampler: RowSampler, first: int, count: int) -> list[int]:
    tokens = []
    for position in range(first, first + count):
        token = pick(sampler, step_logits(position), position)
        assert token is not None
        sampler.accept(token)
        tokens.append(token)
    return tokens


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 20),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.0, 0.5]),
)
def test_a_row_that_was_put_back_continues_exactly(
    seed: int, pause: int, temperature: float, repetition: float, frequency: float
) -> None:
    params = RequestOptions(
        temperature=temperature,
        seed=seed,
        top_p=0.95,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
    )
    prompt = [1, 2, 3]
    whole = generate(RowSampler(params, prompt, 3, VOCAB), 3, 20)
    resumed = RowSampler(params, prompt + whole[:pause], 3, VOCAB)
    assert generate(resumed, 3 + pause, 20 - pause) == whole[pause:]


def test_default_parameters_are_greedy_and_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[9, 4]] = 2
    assert pick(RowSampler(RequestOptions(), [], 0, VOCAB), logits, 0) == 4


def test_greedy_obeys_penalties_and_bias() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 8]] = [2.0, 1.5]
    penalised = RowSampler(RequestOptions(repetition_penalty=2.0), [3], 1, VOCAB)
    assert pick(penalised, logits, 1) == 8
    biased = RowSampler(RequestOptions(logit_bias=((30, 5.0),)), [3], 1, VOCAB)
    assert pick(biased, logits, 1) == 30


def test_bias_is_added_after_the_repetition_penalty() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 8]] = [4.0, 4.5]
    params = RequestOptions(repetition_penalty=2.0, logit_bias=((3, 3.0),))
    # 4 / 2 + 3 = 5 beats 4.5; the other order would give (4 + 3) / 2.
    assert pick(RowSampler(params, [3], 1, VOCAB), logits, 1) == 3


def test_seeds_differ_and_repeat() -> None:
    def text(seed: int) -> list[int]:
        params = RequestOptions(temperature=2.0, seed=seed)
        return generate(RowSampler(params, [], 0, VOCAB), 0, 30)

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_scores_that_leave_float32_are_not_finite() -> None:
    logits = np.full(VOCAB, 3e38, np.float32)
    sampler = RowSampler(RequestOptions(repetition_penalty=0.01), [5], 1, VOCAB)
    with np.errstate(over="ignore"):
        assert pick(sampler, logits, 1) is None


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(HearthError) as caught:
        RowSampler(RequestOptions(logit_bias=((VOCAB, 1.0),)), [], 0, VOCAB)
    assert caught.value.field == "logit_bias"
