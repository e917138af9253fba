import numpy as np
from numpy.typing import NDArray

from runtime.request import RequestOptions
from runtime.sampling.ranking import leading, ranked

# The nucleus is first sought among tokens within this distance (natural log) of the likeliest.
_NEAR = np.float32(-4)
# Where that is too little, scores are counted in this many bins, so many to a unit.
_BINS = 1024
_BINS_PER_UNIT = 32


def kept_tokens(scores: NDArray[np.float32], params: RequestOptions) -> NDArray[np.intp] | None:
    """Ids that pass top-k, top-p and min-p, ascending; None stands for every id.

    `scores` [V] are already divided by the temperature, and the highest of them is 0.
    """
    kept: NDArray[np.intp] | None = None
    if 0 < params.top_k < scores.size:
        kept = leading(scores, params.top_k)
        if params.top_p < 1:
            kept = kept[: _nucleus_size(np.exp(scores[kept]), params.top_p)]
    elif params.top_p < 1:
        kept = _nucleus(scores, params.top_p)
    if params.min_p > 0:
        kept = _likely(scores, kept, params.min_p)
    return None if kept is None else np.sort(kept)


def _nucleus(scores: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The shortest ranking whose probability reaches `top_p` (Holtzman et al., ICLR 2020).

    Only the tokens around its end are ranked: what certainly belongs to it needs no order.
    """
    weights = np.exp(scores)
    wanted = top_p * float(weights.sum(dtype=np.float64))
    certain, edge = np.empty(0, np.intp), np.flatnonzero(scores >= _NEAR)
    if weights[edge].sum(dtype=np.float64) < wanted:
        certain, edge = _around_mass(scores, weights, wanted)
        wanted -= float(weights[certain].sum(dtype=np.float64))
    order = ranked(scores[edge], edge)
    mass = np.cumsum(weights[order], dtype=np.float64)
    return np.concatenate((certain, order[: int(mass.searchsorted(wanted)) + 1]))


def _around_mass(
    scores: NDArray[np.float32], weights: NDArray[np.float32], wanted: float
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Ids of the bins above, and ids of the bin in which the cumulative weight is `wanted`."""
    last = np.float32(_BINS - 1)
    bins = np.minimum(scores * np.float32(-_BINS_PER_UNIT), last).astype(np.intp)
    mass = np.cumsum(np.bincount(bins, weights=weights))
    edge = int(mass.searchsorted(wanted))
    return np.flatnonzero(bins < edge), np.flatnonzero(bins == edge)


def _nucleus_size(weights: NDArray[np.float32], top_p: float) -> int:
    """How many of the ranked `weights` reach the share `top_p` of their sum; at least 1."""
    mass = np.cumsum(weights, dtype=np.float64)
    return int(mass.searchsorted(top_p * mass[-1])) + 1


def _likely(
    scores: NDArray[np.float32], kept: NDArray[np.intp] | None, min_p: float
) -> NDArray[np.intp]:
    """Ids of `kept` at least `min_p` times as likely as the likeliest (Nguyen et al., 2024)."""
    if kept is None:
        return np.flatnonzero(np.exp(scores) >= min_p)
    return kept[np.exp(scores[kept]) >= min_p]
