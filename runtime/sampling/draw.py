import math

import numpy as np
from numpy.typing import NDArray

from runtime.request import RequestOptions
from runtime.sampling.filters import kept_tokens

_BLOCK = 1024
_SMALLEST = float(np.finfo(np.float32).tiny)


def tempered(
    scores: NDArray[np.float32], highest: float, temperature: float
) -> NDArray[np.float32]:
    """(score - highest score) / temperature, [V]: at most 0, so that its exponential is a weight.

    A temperature below the smallest normal float32 counts as that; a quotient that overflows is
    -inf, whose weight is 0.
    """
    relative: NDArray[np.float32] = scores - np.float32(highest)
    relative /= np.float32(max(temperature, _SMALLEST))
    return relative


def draw(scores: NDArray[np.float32], params: RequestOptions, uniform: float) -> int:
    """Filter tempered `scores` [V] and pick the token at `uniform`, a number in [0, 1)."""
    kept = kept_tokens(scores, params)
    if kept is None:
        return invert(np.exp(scores), uniform)
    return int(kept[invert(np.exp(scores[kept]), uniform)])


def invert(weights: NDArray[np.float32], uniform: float) -> int:
    """The first index whose cumulative weight exceeds `uniform` times the sum of `weights` [n].

    Sums run over blocks of 1,024 weights and then within the block that is hit, in float64; a
    token of weight 0 is never picked (inversion, Devroye 1986, section III.2).
    """
    if weights.size <= _BLOCK:
        mass = np.cumsum(weights, dtype=np.float64)
        return _first_above(mass, uniform * mass[-1])
    starts = np.arange(0, weights.size, _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * blocks[-1]
    block = _first_above(blocks, target)
    first = block * _BLOCK
    mass = np.cumsum(weights[first : first + _BLOCK], dtype=np.float64)
    return first + _first_above(mass, target - (blocks[block - 1] if block else 0.0))


def _first_above(mass: NDArray[np.float64], target: float) -> int:
    # Rounding may carry the target up to the last sum; the largest number below that is meant.
    target = min(target, math.nextafter(mass[-1], 0.0))
    return int(mass.searchsorted(target, side="right"))
