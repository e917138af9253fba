"""Rotation and attention in NumPy: what the kernels of `csrc/attention` must compute.

They have the same splits, spans and roundings, and differ in the order of the sums within these.
Arithmetic is float32; `dtype` is the engine's type, to which queries, keys, values and the powers
of scores are rounded.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SPLIT = 64
"""Positions of a split."""
SPAN = 4
"""Splits of a span."""


def rotated(
    raw: Array, gain: Array | None, eps: float, tables: tuple[Array, Array], scale: float
) -> Array:
    """Heads float32 [..., D] with their norm, their turn and a scale: a query's is D^-0.5.

    They are turned by cosines and sines [..., R / 2]. The result is not rounded yet.
    """
    heads = raw.astype(np.float32)
    if gain is not None:
        mean = np.mean(np.square(heads), axis=-1, keepdims=True)
        heads = heads / np.sqrt(mean + np.float32(eps)) * gain.astype(np.float32)
    cos, sin = tables
    half = cos.shape[-1]
    one, other, rest = np.split(heads, [half, 2 * half], axis=-1)
    turned = (one * cos - other * sin, other * cos + one * sin, rest)
    joined: Array = np.concatenate(turned, axis=-1) * np.float32(scale)
    return joined


class Sums(NamedTuple):
    """Partial sums over positions: the largest score m, sum l and sum of values o [D]."""

    m: np.float32
    l: np.float32  # noqa: E741 (as in the papers)
    o: Array

    def merged(self, following: "Sums") -> "Sums":
        """Merge with the sums of following positions; empty if both are."""
        m = max(self.m, following.m)
        if m == -np.inf:
            return self
        own, other = np.exp(self.m - m), np.exp(following.m - m)
        return Sums(m, self.l * own + following.l * other, self.o * own + following.o * other)


def seen_slots(start: int, token: int, packed: Array | None) -> list[int]:
    """The slots of the positions that a token of a step sees, in ascending order.

    `packed` int32 [words] is its row of the packed mask, None where it sees all before it.
    """
    if packed is None:
        return [*range(start + token + 1)]
    bits = np.unpackbits(packed.astype("<i4").view(np.uint8), bitorder="little")
    return [*range(start), *(start + np.flatnonzero(bits)).tolist()]


def attended(query: Array, keys: Array, values: Array, dtype: np.dtype[Any]) -> Array:
    """One query [D] over the keys and values [P, D] of its positions, float32 [D]."""
    nothing = Sums(np.float32(-np.inf), np.float32(0), np.zeros(len(query), np.float32))
    whole = nothing
    for first in range(0, len(keys), SPLIT * SPAN):
        span = nothing
        for begin in range(first, min(first + SPLIT * SPAN, len(keys)), SPLIT):
            scores = keys[begin : begin + SPLIT].astype(np.float32) @ query.astype(np.float32)
            m = scores.max()
            powers = np.exp(scores - m)
            rounded = powers.astype(dtype).astype(np.float32)
            o = rounded @ values[begin : begin + SPLIT].astype(np.float32)
            span = span.merged(Sums(m, powers.sum(), o))
        whole = whole.merged(span)
    return whole.o / whole.l if whole.l else whole.o
