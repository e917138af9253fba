import numpy as np
from numpy.typing import NDArray

_SIGN = np.uint32(1 << 31)
_ID_BITS = np.uint64(32)
_ID_MASK = np.uint64(0xFFFFFFFF)


def ranked(scores: NDArray[np.float32], ids: NDArray[np.intp]) -> NDArray[np.intp]:
    """`ids` [n] ordered by their `scores` [n], highest first, equal scores by lowest id.

    Score and id become one integer key, so an unstable sort has only one outcome: the bits of
    a float sort as an unsigned integer once negative ones are inverted and positive ones get
    the sign bit (M. Herf, "Radix tricks", 2001); inverting them all turns the order around.
    """
    # Adding zero makes -0.0 and 0.0, which are equal, one bit pattern.
    bits = (scores + np.float32(0)).view(np.uint32)
    descending = np.where(bits & _SIGN, bits, ~(bits | _SIGN))
    keys = (descending.astype(np.uint64) << _ID_BITS) | ids.astype(np.uint64)
    keys.sort()
    order: NDArray[np.intp] = (keys & _ID_MASK).astype(np.intp)
    return order


def leading(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Ids of the `count` (at least 1) highest of `scores` [V], ranked; all when V is smaller."""
    rest = scores.size - count
    if rest <= 0:
        return ranked(scores, np.arange(scores.size))
    bound = np.partition(scores, rest)[rest]
    ids = np.flatnonzero(scores >= bound)
    return ranked(scores[ids], ids)[:count]
