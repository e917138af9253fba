import numpy as np
from numpy.typing import NDArray

from hearth.runtime.sampling.ranking import leading

_LOWEST = np.float32(-np.inf)
# Up to this many scores are sorted; of more, those are sought that can be among the best.
_FEW = 1024
_COLUMNS = 128


def top_k(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the `count` best along the last axis of `scores` [..., n], ranked.

    The highest comes first, equal ones by lowest index, and a NaN counts as -inf. `count` is
    at most n.
    """
    size = scores.shape[-1]
    flat = scores.reshape(-1, size)
    if count == 1 and (found := _highest(flat)) is not None:
        return found.reshape(*scores.shape[:-1], 1)
    if flat.size <= _FEW:
        best = np.argsort(-_known(flat), axis=-1, kind="stable")[:, :count]
    else:
        best = _leading(flat, count)
    return best.reshape(*scores.shape[:-1], count)


def _highest(scores: NDArray[np.float32]) -> NDArray[np.intp] | None:
    """The first highest of scores [rows, n]; None where a NaN, which `argmax` prefers, hides it."""
    best: NDArray[np.intp] = scores.argmax(axis=1)
    return None if np.isnan(scores[np.arange(best.size), best]).any() else best


def _leading(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """`top_k` of scores [rows, n]: only what reaches a lower bound of the last place is ranked.

    Of so many columns, each the maximum of its own scores, `count` reach their `count`-th
    highest: so many scores at least do as well.
    """
    rows, size = scores.shape
    columns = min(size, max(_COLUMNS, 2 * count))
    deep = size // columns
    highest = scores[:, : deep * columns].reshape(rows, deep, columns).max(axis=1)
    highest.partition(columns - count, axis=-1)
    hits = np.flatnonzero(scores >= highest[:, columns - count, None])
    found = np.bincount(hits // size, minlength=rows)
    if found.min() < count:
        # A NaN hides what is below it.
        return np.array([leading(row, count) for row in _known(scores)])
    order = np.lexsort((-scores.reshape(-1)[hits], hits // size))
    first = (np.cumsum(found) - found)[:, None]
    best: NDArray[np.intp] = hits[order[first + np.arange(count)]] % size
    return best


def _known(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.isnan(scores), _LOWEST, scores)
