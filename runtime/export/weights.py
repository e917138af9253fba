"""Checkpoint tensors turned into graph weights: fused, transposed, cast or quantised by slabs.

Quantised weights have eight or four bits: unsigned integers that share a scale by block of inputs.
A weight is element((n - z) * s), rounded once to the engine's type: n is its integer, s the scale
and z the zero point of its block. Without zero points z is the middle, 128 or 8.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision_config import VisionConfig

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


Array = NDArray[Any]
Made = TypeVar("Made")
SLAB_BYTES = 32 << 20
TILE_BYTES = 4 << 20
HEAD = "head"
"""The projection that gives the logits."""
_BFLOAT = np.dtype(ml_dtypes.bfloat16)
_INTEGERS = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4}


class Projection(NamedTuple):
    """A matrix product of the graph: its name, the matrices it joins, and (in, sum of out)."""

    name: str
    sources: Sequence[str]
    shape: tuple[int, int]


class Weights:
    """Puts the projections and vectors of a checkpoint into a graph, one slab in memory."""

    def __init__(
        self, checkpoint: Checkpoint, config: LLMEngineRunnerConfig | VisionConfig
    ) -> None:
        self._checkpoint = checkpoint
        self._body, self._head = config.weight_quantization, config.head_weights
        self._block_size = config.weight_block_size
        self._as_stored = reads_as_stored(config)
        self.dtype = numpy_dtype(config.dtype)

    def vector(self, graph: GraphBuilder, name: str, sources: Sequence[str]) -> ir.Value:
        """Vectors of the checkpoint, one behind the other."""
        parts = [cast(self._checkpoint.vector(source), self.dtype, source) for source in sources]
        return graph.vector(name, np.concatenate(parts))

    def project(self, graph: GraphBuilder, x: ir.Value, projection: Projection) -> ir.Value:
        """Multiply x [..., in] by the matrices [out_i, in] side by side: [..., sum of out_i]."""
        kind = self._head if projection.name == HEAD else self._body
        if kind == "none":
            dtype = ir.DataType.from_numpy(self.dtype)
            slabs = self._slabs(projection)
            weight = graph.weight(projection.name, dtype, projection.shape, slabs)
        elif self._as_stored:
            return self._multiplied(graph, x, projection)
        else:
            weight = self._quantized(graph, projection, kind)
        return graph.op("MatMul", x, weight)

    def _quantized(self, graph: GraphBuilder, projection: Projection, kind: Kind) -> ir.Value:
        block = self._block_size
        scales: list[Array] = []
        weight = graph.weight(
            projection.name,
            _INTEGERS[kind],
            projection.shape,
            self._quantized_slabs(projection, kind, scales),
        )
        dtype = ir.DataType.from_numpy(self.dtype)
        shape = (projection.shape[0] // block, projection.shape[1])
        scale = graph.weight(f"{projection.name}_scale", dtype, shape, scales)
        return graph.op("DequantizeLinear", weight, scale, axis=0, block_size=block)

    def _multiplied(self, graph: GraphBuilder, x: ir.Value, projection: Projection) -> ir.Value:
        """A MatMulNBits, whose weights lie as the checkpoint has them."""
        (inputs, outputs), block = projection.shape, self._block_size
        scales: list[Array] = []
        shape = (outputs, inputs // block, block // 2)
        pieces = self._packed_rows(projection, scales)
        weight = graph.weight(projection.name, ir.DataType.UINT8, shape, pieces)
        dtype = ir.DataType.from_numpy(self.dtype)
        scale = graph.weight(f"{projection.name}_scale", dtype, shape[:2], scales)
        sizes = {"K": inputs, "N": outputs, "bits": 4, "block_size": block}
        return graph.op("com.microsoft::MatMulNBits", x, weight, scale, **sizes)

    def _packed_rows(self, projection: Projection, scales: list[Array]) -> Iterator[Array]:
        """Rows of the joined matrix in four bits; appends their scales to `scales`."""
        for source in projection.sources:
            rows = quantised_rows(self._checkpoint, source, "int4", self._block_size, self.dtype)
            for made in rows:
                scales.append(made.scales)
                yield pack(made.integers)

    def _slabs(self, projection: Projection) -> Iterator[Array]:
        """Rows of the joined, transposed matrix, some megabytes at a time."""
        rows, columns = projection.shape
        height = max(1, SLAB_BYTES // (columns * self.dtype.itemsize))
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            slab = np.empty((stop - start, columns), self.dtype)
            for place, source, tile in self._tiles(projection, start, stop):
                slab[:, place] = cast(tile, self.dtype, source)
            yield slab

    def _quantized_slabs(
        self, projection: Projection, kind: Kind, scales: list[Array]
    ) -> Iterator[Array]:
        """As `_slabs`, one block high; appends the scales [1, out] of each slab to `scales`."""
        rows, columns = projection.shape
        for start in range(0, rows, self._block_size):
            slab = np.empty((self._block_size, columns), np.uint8)
            scale = np.empty((1, columns), self.dtype)
            for place, source, tile in self._tiles(projection, start, start + self._block_size):
                made = quantised(tile.T, kind, self._block_size, self.dtype, source)
                slab[:, place], scale[:, place] = made.integers.T, made.scales.T
            scales.append(scale)
            slab ^= np.uint8(MIDDLE[kind])  # signed, as ONNX has them without zero points
            yield pack(slab.reshape(-1)) if kind == "int4" else slab.view(np.int8)

    def _tiles(
        self, projection: Projection, start: int, stop: int
    ) -> Iterator[tuple[slice, str, Array]]:
        """Parts of rows [start, stop): columns of the joined matrix, source, [rows, columns]."""
        width = max(1, TILE_BYTES // ((stop - start) * 4))
        left = 0
        for source in projection.sources:
            count = self._checkpoint.shape(source)[0]
            for first in range(0, count, width):
                last = min(first + width, count)
                part = self._checkpoint.matrix(source, slice(first, last), slice(start, stop))
                yield slice(left + first, left + last), source, part.T
            left += count


def reads_as_stored(config: LLMEngineRunnerConfig | VisionConfig) -> bool:
    """Return True if integers are stored in the checkpoint's row order, with signed scales.

    ONNX Runtime's CUDA provider takes four bits so, in a product of its own, and so do our kernels;
    others take positive scales and a DequantizeLinear.
    """
    return config.device == "cuda" and config.backend != "tensorrt"


def row_pieces(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
) -> Iterator[Array]:
    """A matrix of the checkpoint cast to `dtype`, by pieces of whole rows."""

    def piece(rows: slice) -> Array:
        return cast(checkpoint.matrix(name, rows, slice(None)), dtype, name)

    yield from in_threads(piece, row_slices(shape, TILE_BYTES // dtype.itemsize))


def quantised_rows(
    checkpoint: Checkpoint, name: str, kind: Kind, block: int, dtype: np.dtype[Any]
) -> Iterator[Quantised]:
    """A matrix of the checkpoint rounded with signed scales, by pieces of whole rows."""
    shape = checkpoint.shape(name)

    def piece(rows: slice) -> Quantised:
        matrix = checkpoint.matrix(name, rows, slice(None))
        return quantised(matrix, kind, block, dtype, name, signed=True)

    yield from in_threads(piece, row_slices((shape[0], shape[1]), TILE_BYTES // 4))


def in_threads(make: Callable[[slice], Made], parts: Iterable[slice]) -> Iterator[Made]:
    """Yield `make` of each part, in order, run in threads; about two for each core are held."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        waiting: deque[Future[Made]] = deque()
        for part in parts:
            waiting.append(pool.submit(make, part))
            if len(waiting) > cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def row_slices(shape: tuple[int, int], elements: int = TILE_BYTES // 4) -> Iterator[slice]:
    """Whole rows of a matrix, about so many elements at a time."""
    step = max(1, elements // shape[1])
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def quantised(
    rows: Array, kind: Kind, block: int, dtype: np.dtype[Any], name: str, *, signed: bool = False
) -> Quantised:
    """Rows [n, in] rounded; `model_invalid` when a value, or a scale in `dtype`, is not finite."""
    wide = np.ascontiguousarray(cast(rows, np.dtype(np.float32), name))
    made = round_weights(wide, kind, block, dtype, signed=signed)
    cast(made.scales, dtype, name)
    return made


def cast(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """The array in another type; `model_invalid` when a value is not finite in it."""
    with np.errstate(over="ignore"):
        if array.dtype == _BFLOAT and dtype == np.float16:
            # By float32, which holds both: a cast that other threads need not wait for.
            array = array.astype(np.float32)
        result = array.astype(dtype, copy=False)
    if not np.isfinite(result).all():
        raise HearthError(
            "model_invalid", f"{name} holds a value that is not finite in {dtype}", name
        )
    return result
