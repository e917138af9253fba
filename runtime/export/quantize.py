"""Symmetric blocked integers: weights that share a scale per block of rows, without zero points."""

import numpy as np
from numpy.typing import NDArray

# Bounds of the integers, and the integers that the largest magnitude of a block may map to. With
# four bits, scales that clip it or leave room often fit the other weights better.
_INTEGERS = {"int8": (-127, 127, (127.0,)), "int4": (-8, 7, (7.0, 7.5, 8.0))}


def quantize_rows(
    rows: NDArray[np.float32], bits: str, block_size: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a matrix [n * block_size, out] to integers of that shape and scales [n, out].

    Rounds to nearest. Of the scales tried for a block, the one with the smallest sum of squared
    errors is kept. A block that is all but zero becomes zero.
    """
    blocks = rows.reshape(-1, block_size, rows.shape[1])
    low, high, targets = _INTEGERS[bits]
    largest = np.abs(blocks).max(axis=1)
    best, scales = _round(blocks, largest / np.float32(targets[0]), low, high)
    error = _squared_error(blocks, best, scales)
    for target in targets[1:]:
        integers, other = _round(blocks, largest / np.float32(target), low, high)
        other_error = _squared_error(blocks, integers, other)
        better = other_error < error
        best = np.where(better[:, None, :], integers, best)
        scales = np.where(better, other, scales)
        error = np.where(better, other_error, error)
    return best.reshape(rows.shape), scales


def _round(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], low: int, high: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    # The inverse of a subnormal scale would be infinite.
    usable = scales >= np.finfo(np.float32).tiny
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=usable)
    return np.clip(np.rint(blocks * inverse[:, None, :]), low, high).astype(np.int8), scales


def _squared_error(
    blocks: NDArray[np.float32], integers: NDArray[np.int8], scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    difference = integers * scales[:, None, :] - blocks
    error: NDArray[np.float32] = np.einsum("nbo,nbo->no", difference, difference)
    return error


def pack_int4(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two integers per byte, the earlier in the low half, as ONNX stores int4; flat."""
    flat = integers.reshape(-1).view(np.uint8)
    packed: NDArray[np.uint8] = (flat[0::2] & np.uint8(0x0F)) | (flat[1::2] << np.uint8(4))
    return packed
