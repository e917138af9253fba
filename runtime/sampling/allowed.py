from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_WORD_BITS = 32


def pack_allowed(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """A mask with bit i % 32 of word i // 32 set for each of `token_ids`: [(V + 31) // 32].

    Bits from `vocab_size` on are 0; an id outside of the vocabulary raises `IndexError`.
    """
    allowed = np.zeros(vocab_size, np.bool_)
    ids = np.fromiter(token_ids, np.intp)
    if ids.size and ids.min() < 0:
        raise IndexError("token ids are at least 0")
    allowed[ids] = True
    words = -(-vocab_size // _WORD_BITS)
    data = np.zeros(words * _WORD_BITS // 8, np.uint8)
    bits = np.packbits(allowed, bitorder="little")
    data[: bits.size] = bits
    return data.view("<u4").astype(np.uint32)


def forbid_others(scores: NDArray[np.float32], mask: NDArray[np.uint32]) -> NDArray[np.float32]:
    """`scores` [V] with -inf for every token whose bit in `mask` is 0.

    It comes after penalties and bias; a row without any allowed token has no finite score.
    """
    data = mask.astype("<u4").view(np.uint8)
    allowed = np.unpackbits(data, count=scores.size, bitorder="little").astype(np.bool_)
    return np.where(allowed, scores, np.float32(-np.inf))
