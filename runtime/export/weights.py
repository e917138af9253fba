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

Array = NDArray[Any]
SLAB_BYTES = 32 << 20
_INTEGERS = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4}


class Projection(NamedTuple):
    """A matrix product of the graph: its name, the matrices it joins, and (in, sum of out)."""

    name: str
    sources: Sequence[str]
    shape: tuple[int, int]


class Weights:
    """Puts the projections and vectors of a checkpoint into a graph, one slab in memory."""

    def __init__(self, checkpoint: Checkpoint, config: LLMEngineRunnerConfig) -> None:
        self._checkpoint = checkpoint
        self._quantization = config.weight_quantization
        self._block_size = config.weight_block_size
        self.dtype = np.dtype(config.dtype)

    def vector(self, graph: GraphBuilder, name: str, sources: Sequence[str]) -> ir.Value:
        """Vectors of the checkpoint, one behind the other."""
        parts = [
            finite(self._checkpoint.vector(source).astype(self.dtype), source) for source in sources
        ]
        return graph.vector(name, np.concatenate(parts))

    def project(self, graph: GraphBuilder, x: ir.Value, projection: Projection) -> ir.Value:
        """Multiply x [..., in] by the matrices [out_i, in] side by side: [..., sum of out_i]."""
        if self._quantization == "none":
            slabs = self._slabs(projection, self.dtype)
            dtype = ir.DataType.from_numpy(self.dtype)
            weight = graph.weight(projection.name, dtype, projection.shape, slabs)
        else:
            weight = self._quantized(graph, projection)
        return graph.op("MatMul", x, weight)

    def _quantized(self, graph: GraphBuilder, projection: Projection) -> ir.Value:
        bits, block = self._quantization, self._block_size
        rows, columns = projection.shape
        scales: list[Array] = []

        def integers() -> Iterator[Array]:
            for slab in self._slabs(projection, np.dtype(np.float32)):
                quantized, scale = quantize_rows(slab, bits, block)
                scales.append(finite(scale.astype(self.dtype), projection.name))
                yield pack_int4(quantized) if bits == "int4" else quantized

        weight = graph.weight(projection.name, _INTEGERS[bits], projection.shape, integers())
        dtype = ir.DataType.from_numpy(self.dtype)
        shape = (rows // block, columns)
        scale = graph.weight(f"{projection.name}_scale", dtype, shape, scales)
        return graph.op("DequantizeLinear", weight, scale, axis=0, block_size=block)

    def _slabs(self, projection: Projection, dtype: np.dtype[Any]) -> Iterator[Array]:
        """Row by row of the transposed, fused matrix; slabs end where blocks end."""
        block = max(1, self._block_size)
        rows, columns = projection.shape
        height = max(1, SLAB_BYTES // (columns * dtype.itemsize * block)) * block
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            slab = np.empty((stop - start, columns), dtype)
            left = 0
            for source in projection.sources:
                piece = self._checkpoint.columns(source, start, stop)
                slab[:, left : left + len(piece)] = finite(piece.astype(dtype), source).T
                left += len(piece)
            yield slab


def row_pieces(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
) -> Iterator[Array]:
    """A matrix of the checkpoint cast to `dtype`, by pieces of whole rows."""
    step = max(1, SLAB_BYTES // (shape[1] * dtype.itemsize))
    for start in range(0, shape[0], step):
        piece = checkpoint.rows(name, start, min(start + step, shape[0]))
        yield finite(piece.astype(dtype, copy=False), name)


def finite(array: Array, name: str) -> Array:
    """The array, or `model_invalid` when a value is not finite in this type."""
    if not np.isfinite(array).all():
        raise HearthError(
            "model_invalid", f"{name} holds a value that is not finite in {array.dtype}", name
        )
    return array
