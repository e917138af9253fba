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
    scales, *others = (largest / np.float32(target) for target in targets)
    if others:
        error = _squared_error(blocks, scales, low, high)
    for other in others:
        other_error = _squared_error(blocks, other, low, high)
        scales = np.where(other_error < error, other, scales)
        error = np.minimum(other_error, error)
    return _round(blocks, scales, low, high).astype(np.int8).reshape(rows.shape), scales


def _round(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], low: int, high: int
) -> NDArray[np.float32]:
    # The inverse of a subnormal scale would be infinite.
    usable = scales >= np.finfo(np.float32).tiny
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=usable)
    integers: NDArray[np.float32] = blocks * inverse[:, None, :]
    np.rint(integers, out=integers)
    return np.clip(integers, low, high, out=integers)


def _squared_error(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], low: int, high: int
) -> NDArray[np.float32]:
    difference = _round(blocks, scales, low, high)
    difference *= scales[:, None, :]
    difference -= blocks
    error: NDArray[np.float32] = np.einsum("nbo,nbo->no", difference, difference)
    return error


def pack_int4(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two integers per byte, the earlier in the low half, as ONNX stores int4; flat."""
    flat = integers.reshape(-1).view(np.uint8)
    packed: NDArray[np.uint8] = (flat[0::2] & np.uint8(0x0F)) | (flat[1::2] << np.uint8(4))
    return packed
