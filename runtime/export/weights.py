"""Checkpoint tensors turned into graph weights: fused, transposed, cast or quantised by slabs."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

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
from hearth.runtime.weights.quantised import MIDDLE, Kind, Quantised, pack, round_weights

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
