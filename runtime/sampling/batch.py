from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.request import TopLogprob
from runtime.sampling.logprobs import log_normaliser, top_logprobs
from runtime.sampling.row_sampler import RowSampler


class Sample(msgspec.Struct, frozen=True):
    """The token picked for a row; `logprob` and `top` are set when the row asks for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


def sample_rows(
    logits: NDArray[np.float32], samplers: Sequence[RowSampler], positions: Sequence[int]
) -> list[Sample | None]:
    """Pick the next token of every row from `logits` [n, V]; None for a row that is not finite.

    `positions[i]` is the index that the new token will have in row i's sequence. Rows do not
    affect one another, and nothing is added to their histories.
    """
    best = logits.argmax(axis=1)
    # The argmax finds a NaN or +inf and the minimum a NaN or -inf: together they see every
    # value at the price of two passes, without a temporary array.
    finite = np.isfinite(logits[np.arange(best.size), best]) & np.isfinite(logits.min(axis=1))
    # Differences and quotients of finite float32 values may leave its range: they become -inf,
    # which has weight 0, or are refused by `RowSampler.pick`.
    with np.errstate(over="ignore"):
        return [
            sample_row(logits[row], int(best[row]), sampler, positions[row])
            if finite[row]
            else None
            for row, sampler in enumerate(samplers)
        ]


def sample_row(
    logits: NDArray[np.float32], best: int, sampler: RowSampler, position: int
) -> Sample | None:
    """Pick one row's token from finite `logits` [V] whose argmax is `best`.

    None when the row's penalties and bias leave no finite score.
    """
    token_id = sampler.pick(logits, best, position)
    wanted = sampler.params.logprobs
    if token_id is None or wanted is None:
        return None if token_id is None else Sample(token_id)
    normaliser = log_normaliser(logits, logits[best])
    logprob = float(logits[token_id]) - normaliser
    return Sample(token_id, logprob, top_logprobs(logits, normaliser, wanted))
