import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_BLOCK = 64


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each counter: [..., 4] and a key [2] to words [..., 4].

    Every word is below 2**32 and held in uint64, whose products are then exact. The generator
    is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
    1, 2, 3", SC 2011, section 4.3.
    """
    even, odd = counter[..., 0::2], counter[..., 1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even = (product[..., ::-1] >> _HALF) ^ odd ^ key
        odd = product[..., ::-1] & _MASK
        key = (key + _WEYL) & _MASK
    return np.stack((even, odd), axis=-1).reshape(counter.shape)


def uniforms(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """Numbers [count] in [0, 1) with 53 random bits for the positions from `first` on.

    The seed (64 bits, low word first) is the key; the counter is the position in its two low
    words and zero in the others.
    """
    positions = np.arange(first, first + count, dtype=np.uint64)
    counter = np.zeros((count, 4), np.uint64)
    counter[:, 0] = positions & _MASK
    counter[:, 1] = positions >> _HALF
    words = philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64))
    bits = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


class UniformSource:
    """The uniform number of each position for one seed, computed in aligned blocks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = -1
        self._numbers = np.empty(0)

    def at(self, position: int) -> float:
        """The number in [0, 1) that belongs to `position`, whatever was asked before."""
        first = position - position % _BLOCK
        if first != self._first:
            self._numbers = uniforms(self._seed, first, _BLOCK)
            self._first = first
        return float(self._numbers[position - first])
