import numpy as np
import pytest

from hearth.runtime.sampling.batch import log_normaliser, top_logprobs
from tests.runtime.sampling import reference


def logits(size: int = 300) -> np.ndarray:
    return np.random.default_rng(2).standard_normal(size).astype(np.float32) * 4


def test_probabilities_add_up_to_one() -> None:
    row = logits()
    normaliser = log_normaliser(row, row.max())
    assert np.exp(row.astype(np.float64) - normaliser).sum() == pytest.approx(1, abs=1e-6)


def test_large_logits_do_not_overflow() -> None:
    row = np.array([1000, 1000], np.float32)
    assert log_normaliser(row, row.max()) == pytest.approx(1000 + np.log(2))


def test_the_likeliest_tokens_come_first_and_ties_by_id() -> None:
    row = logits()
    row[[200, 7]] = row.max() + 1
    top = top_logprobs(row, 0.0, 5)
    assert [entry.token_id for entry in top] == reference.ranked(row.tolist())[:5]
    assert [entry.token_id for entry in top[:2]] == [7, 200]
    assert top[0].logprob == pytest.approx(float(row[7]))


def test_none_wanted_is_none_given() -> None:
    assert top_logprobs(logits(), 0.0, 0) == ()
