"""Checkpoint tensors turned into graph weights: fused, transposed, cast or quantised by slabs."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.export.checkpoint import Checkpoint
from runtime.export.graph import GraphBuilder
from runtime.export.quantize import pack_int4, quantize_rows
from runtime.tensors.dtypes import numpy_dtype
from runtime.vision_config import VisionConfig

Array = NDArray[Any]
SLAB_BYTES = 32 << 20
TILE_BYTES = 4 << 20
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
        self._quantization = config.weight_quantization
        self._block_size = config.weight_block_size
        self.dtype = numpy_dtype(config.dtype)

    def vector(self, graph: GraphBuilder, name: str, sources: Sequence[str]) -> ir.Value:
        """Vectors of the checkpoint, one behind the other."""
        parts = [cast(self._checkpoint.vector(source), self.dtype, source) for source in sources]
        return graph.vector(name, np.concatenate(parts))

    def project(self, graph: GraphBuilder, x: ir.Value, projection: Projection) -> ir.Value:
        """Multiply x [..., in] by the matrices [out_i, in] side by side: [..., sum of out_i]."""
        if self._quantization == "none":
            dtype = ir.DataType.from_numpy(self.dtype)
            slabs = self._slabs(projection)
            weight = graph.weight(projection.name, dtype, projection.shape, slabs)
        else:
            weight = self._quantized(graph, projection)
        return graph.op("MatMul", x, weight)

    def _quantized(self, graph: GraphBuilder, projection: Projection) -> ir.Value:
        block = self._block_size
        scales: list[Array] = []
        weight = graph.weight(
            projection.name,
            _INTEGERS[self._quantization],
            projection.shape,
            self._quantized_slabs(projection, scales),
        )
        dtype = ir.DataType.from_numpy(self.dtype)
        shape = (projection.shape[0] // block, projection.shape[1])
        scale = graph.weight(f"{projection.name}_scale", dtype, shape, scales)
        return graph.op("DequantizeLinear", weight, scale, axis=0, block_size=block)

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

    def _quantized_slabs(self, projection: Projection, scales: list[Array]) -> Iterator[Array]:
        """As `_slabs`, one block high; appends the scales [1, out] of each slab to `scales`."""
        rows, columns = projection.shape
        for start in range(0, rows, self._block_size):
            slab = np.empty((self._block_size, columns), np.int8)
            scale = np.empty((1, columns), np.float32)
            for place, source, tile in self._tiles(projection, start, start + self._block_size):
                wide = cast(tile, np.dtype(np.float32), source)
                slab[:, place], scale[:, place] = quantize_rows(
                    wide, self._quantization, self._block_size
                )
            scales.append(cast(scale, self.dtype, projection.name))
            yield pack_int4(slab) if self._quantization == "int4" else slab

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


def row_pieces(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
) -> Iterator[Array]:
    """A matrix of the checkpoint cast to `dtype`, by pieces of whole rows."""
    step = max(1, SLAB_BYTES // (shape[1] * dtype.itemsize))
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        yield cast(checkpoint.matrix(name, rows, slice(None)), dtype, name)


def cast(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """The array in another type; `model_invalid` when a value is not finite in it."""
    with np.errstate(over="ignore"):
        result = array.astype(dtype, copy=False)
    if not np.isfinite(result).all():
        raise HearthError(
            "model_invalid", f"{name} holds a value that is not finite in {dtype}", name
        )
    return result
