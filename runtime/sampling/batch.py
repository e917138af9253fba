import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.request import NO_ROW, RowToken, TopLogprob
from hearth.runtime.sampling.ranking import leading
from hearth.runtime.sampling.row_sampler import RowSampler


def log_normaliser(logits: NDArray[np.float32], highest: np.float32) -> float:
    """The natural logarithm of the sum of exp(`logits`) [V], whose maximum is `highest`."""
    weights = np.exp(logits - highest)
    return float(highest) + float(np.log(weights.sum(dtype=np.float64)))


def top_logprobs(
    logits: NDArray[np.float32], normaliser: float, count: int
) -> tuple[TopLogprob, ...]:
    """The `count` likeliest tokens of the raw distribution, ranked; empty for 0."""
    if count == 0:
        return ()
    ids = leading(logits, count)
    return tuple(TopLogprob(int(i), float(logits[i]) - normaliser) for i in ids)


def sample_rows(
    logits: NDArray[np.float32], samplers: Sequence[RowSampler], positions: Sequence[int]
) -> list[RowToken | None]:
    """Sample the next token of every row from `logits` [n, V]; None for a row that is not finite.

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
) -> RowToken | None:
    """Sample one row's token from finite `logits` [V] whose argmax is `best`.

    None when the row's penalties and bias leave no finite score.
    """
    token_id = sampler.pick(logits, best, position)
    wanted = sampler.params.logprobs
    if token_id is None or wanted is None:
        return None if token_id is None else RowToken(NO_ROW, token_id)
    normaliser = log_normaliser(logits, logits[best])
    logprob = float(logits[token_id]) - normaliser
    return RowToken(NO_ROW, token_id, logprob, top_logprobs(logits, normaliser, wanted))


def child_keys(ids: NDArray[np.int32], parents: NDArray[np.int32]) -> list[list[int]]:
    """One number for the parent and the token of each node, ids and parents [rows, width]."""
    keys: list[list[int]] = ((parents.astype(np.int64) << 32) + ids).tolist()
    return keys


def walk_tree(
    logits: NDArray[np.float32], keys: Sequence[int], sampler: RowSampler, position: int
) -> tuple[list[RowToken], list[int]] | None:
    """Sample a token at the root and on at its child with that token, as long as there is one.

    `logits` [width, V] belong to the nodes, `keys` are their `child_keys`, and `position` is
    the one of the token behind the root. Every token is sampled as by `sample_rows` and enters
    the row's history at once, so the text is the one without a tree. Returns the samples and
    the node behind which each was sampled. The walk ends before a node that is not finite; None
    when that is the root.
    """
    samples: list[RowToken] = []
    nodes: list[int] = []
    node: int | None = 0
    while node is not None:
        sample = _pick(logits[node], sampler, position + len(nodes))
        if sample is None:
            break
        sampler.accept(sample.token_id)
        samples.append(sample)
        nodes.append(node)
        node = _child(keys, node, sample.token_id)
    return (samples, nodes) if nodes else None


def _pick(logits: NDArray[np.float32], sampler: RowSampler, position: int) -> RowToken | None:
    best = int(logits.argmax())
    # The argmax finds a NaN or +inf, the minimum a NaN or -inf.
    if not (math.isfinite(logits[best]) and math.isfinite(logits.min())):
        return None
    return sample_row(logits, best, sampler, position)


def _child(keys: Sequence[int], node: int, token_id: int) -> int | None:
    try:
        return keys.index((node << 32) + token_id, node + 1)
    except ValueError:
        return None
