import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.sampling.allowed import forbid_others, pack_allowed


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_only_allowed_tokens_keep_their_scores(case: tuple[int, set[int]]) -> None:
    vocab, allowed = case
    scores = np.arange(vocab, dtype=np.float32)
    kept = forbid_others(scores, pack_allowed(allowed, vocab))
    assert {i for i in range(vocab) if kept[i] == scores[i]} == allowed
    assert all(kept[i] == -np.inf for i in range(vocab) if i not in allowed)


def test_bits_lie_in_words_of_32() -> None:
    mask = pack_allowed([0, 31, 33], 34)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [(1 << 31) | 1, 2]


@pytest.mark.parametrize("token_id", [-1, 34])
def test_an_unknown_token_is_refused(token_id: int) -> None:
    with pytest.raises(IndexError):
        pack_allowed([token_id], 34)
