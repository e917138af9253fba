"""Weights of eight and four bits: unsigned integers that share a scale by block of inputs.

A weight is element((n - z) * s), rounded once to the engine's type: n is its integer, s the scale
and z the zero point of its block. Without zero points z is the middle, 128 or 8.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["int8", "int4"]
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MIDDLE: dict[Kind, int] = {"int8": 128, "int4": 8}
"""The zero point of a form that stores none."""
# Targets of the largest magnitude of a block. With four bits, scales that clip it or leave headroom
# often fit the other weights better.
_TARGETS: dict[Kind, tuple[float, ...]] = {"int8": (127.0,), "int4": (7.0, 7.5, 8.0, 8.5, 9.0)}


class Quantised(NamedTuple):
    """A matrix [out, in]: integers of that shape, scales and zero points [out, in / block]."""

    kind: Kind
    integers: Bytes
    scales: NDArray[Any]
    zeros: Bytes | None = None


def round_weights(
    weights: Float32, kind: Kind, block: int, dtype: np.dtype[Any], *, signed: bool = False
) -> Quantised:
    """Round a matrix [out, in] to the nearest integers, with scales of `dtype` and no zero points.

    Of the scales tried for a block of four bits, each fitted to the integers that it gives, the one
    with the least sum of squared errors is kept. `signed` lets a scale be negative, so that the
    largest weight of a block may become the lowest integer whatever its sign is. A block that is
    all but zero becomes zero; scales that `dtype` cannot hold are infinite.
    """
    blocks = weights.reshape(len(weights), -1, block)
    highest, lowest = blocks.max(axis=-1), blocks.min(axis=-1)
    largest = np.maximum(highest, -lowest)
    if signed:
        largest = np.where(highest > -lowest, -largest, largest)
    targets = _TARGETS[kind]
    if len(targets) == 1:
        scales = largest / np.float32(targets[0])
    else:
        scales = _fitted(blocks, largest, kind, targets)
    with np.errstate(over="ignore"):
        stored = scales.astype(dtype)
    integers = _nearest(blocks, stored.astype(np.float32), kind)
    integers += np.float32(MIDDLE[kind])
    return Quantised(kind, integers.astype(np.uint8).reshape(weights.shape), stored)


def widen(matrix: Quantised, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the weights [out, in] that the integers encode, in the engine's type."""
    rows, blocks = matrix.scales.shape
    zeros: Any = MIDDLE[matrix.kind]
    if matrix.zeros is not None:
        zeros = matrix.zeros[:, :, None].astype(np.float32)
    wide = matrix.integers.reshape(rows, blocks, -1) - np.float32(zeros)
    wide *= matrix.scales[:, :, None].astype(np.float32)
    rounded: NDArray[Any] = wide.astype(dtype)
    return rounded.reshape(rows, -1)


def pack(integers: Bytes) -> Bytes:
    """Two integers of four bits in a byte, the first in the low half: [..., n] as [..., n / 2]."""
    packed: Bytes = integers[..., 0::2] | integers[..., 1::2] << np.uint8(4)
    return packed


def unpack(packed: Bytes) -> Bytes:
    """The inverse of `pack`."""
    halves = np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    return halves.reshape(*packed.shape[:-1], -1)


def _fitted(blocks: Float32, largest: Float32, kind: Kind, targets: tuple[float, ...]) -> Float32:
    """Scales [out, n] by least squares for the best integers among those that targets give."""
    scales, explained = np.zeros_like(largest), np.full_like(largest, -1)
    for target in targets:
        integers = _nearest(blocks, largest / np.float32(target), kind)
        squares = np.einsum("onb,onb->on", integers, integers)
        along = np.einsum("onb,onb->on", integers, blocks)
        fitted = np.divide(along, squares, out=np.zeros_like(along), where=squares > 0)
        # The squared error is that of zeros less this.
        explains = along * fitted
        scales = np.where(explains > explained, fitted, scales)
        explained = np.maximum(explains, explained)
    return scales


def _nearest(blocks: Float32, scales: Float32, kind: Kind) -> Float32:
    """The integers less the middle, as float32."""
    # The inverse of a subnormal scale would be infinite.
    usable = np.abs(scales) >= np.finfo(np.float32).tiny
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=usable)
    integers: Float32 = blocks * inverse[:, :, None]
    np.rint(integers, out=integers)
    middle = MIDDLE[kind]
    return np.clip(integers, -middle, middle - 1, out=integers)
