import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.batch import Sample, sample_row
from runtime.sampling.row_sampler import RowSampler


def child_keys(ids: NDArray[np.int32], parents: NDArray[np.int32]) -> list[list[int]]:
    """One number for the parent and the token of each node, ids and parents [rows, width]."""
    keys: list[list[int]] = ((parents.astype(np.int64) << 32) + ids).tolist()
    return keys


def walk_tree(
    logits: NDArray[np.float32], keys: Sequence[int], sampler: RowSampler, position: int
) -> tuple[list[Sample], list[int]] | None:
    """Pick a token at the root and on at its child with that token, as long as there is one.

    `logits` [width, V] belong to the nodes, `keys` are their `child_keys`, and `position` is
    the one of the token behind the root. Every token is picked as `sample_rows` would and enters
    the row's history at once, so the text is the one without a tree. Returns the samples and
    the node behind which each was picked. The walk ends before a node that is not finite; None
    when that is the root.
    """
    samples: list[Sample] = []
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


def _pick(logits: NDArray[np.float32], sampler: RowSampler, position: int) -> Sample | None:
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
