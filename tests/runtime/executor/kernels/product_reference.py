"""Products and norms in NumPy: what the kernels of `csrc/gemm` compute.

Sums of a segment are exact here, where a kernel has one chain of float32 sums.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SEGMENTS = 8
_BLOCK = 64
_LANES, _CHUNK = 4, 8


def segments(inputs: int) -> list[slice]:
    """The inputs of each of the eight segments, which are whole blocks of 64."""
    blocks = -(-inputs // _BLOCK)
    ends = [segment * blocks // SEGMENTS * _BLOCK for segment in range(SEGMENTS + 1)]
    return [slice(min(one, inputs), min(end, inputs)) for one, end in pairwise(ends)]


def product(a: Array, weights: Array, bias: Array | None = None) -> Array:
    """Elements a [T, K] times weights [rows, K]: float32 [T, rows]."""
    exact, by = a.astype(np.float64), weights.astype(np.float64).T
    total = np.zeros((len(a), len(weights)), np.float32)
    for part in segments(a.shape[1]):
        total += (exact[:, part] @ by[part]).astype(np.float32)
    return total if bias is None else total + bias.astype(np.float32)


def squares(x: Array) -> Array:
    """The sum of squares of float32 rows [T, K], in the kernels' order but for fused additions."""
    total = np.zeros(len(x), np.float32)
    for part in segments(x.shape[1]):
        chunks = np.square(x[:, part]).reshape(len(x), -1, _CHUNK)
        lanes = [chunks[:, q::_LANES].reshape(len(x), -1) for q in range(_LANES)]
        # The sum in ascending order is the last of the running sums.
        ends = [np.cumsum(lane, axis=1)[:, -1] if lane.size else total * 0 for lane in lanes]
        total += (ends[0] + ends[1]) + (ends[2] + ends[3])
    return total


def normed(x: Array, gain: Array, eps: float, dtype: np.dtype[Any]) -> Array:
    """The RMS norm of float32 rows [T, K] as elements."""
    mean = squares(x) / np.float32(x.shape[1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    result: Array = (x * scale[:, None] * gain.astype(np.float32)).astype(dtype)
    return result


def gated(gate: Array, up: Array, dtype: np.dtype[Any]) -> Array:
    """silu(gate) * up of float32 sums, as elements."""
    result: Array = (gate / (np.float32(1) + np.exp(-gate)) * up).astype(dtype)
    return result
