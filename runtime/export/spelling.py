"""What the two dialects of the graph spell differently."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from runtime.export.graph import GraphBuilder
from runtime.export.model_config import ModelConfig

# Symbolic dimensions: rows, tokens of a step, tokens with logits, cache slots, rotary positions.
BATCH, STEP, SELECTED, CAPACITY, POSITIONS = "batch", "step", "selected", "capacity", "positions"


class StepInputs(NamedTuple):
    """The graph inputs that are not caches."""

    embeds: ir.Value
    start: ir.Value
    positions: ir.Value
    last: ir.Value
    cos: ir.Value
    sin: ir.Value


class KeyValue(NamedTuple):
    """Keys and values: the rows of a step or a whole cache, each [B, Hkv, slots, D]."""

    k: ir.Value
    v: ir.Value


class Spelling(ABC):
    """How one dialect writes normalisation, rotation and attention.

    Activations are [B, S, H], heads [B, heads, S, D] and caches [B, Hkv, C, D]. The G query heads
    that share a K/V head are attended to as rows of one head, so that keys and values are read
    once and not G times.
    """

    index_type: ir.DataType

    def __init__(self, graph: GraphBuilder, model: ModelConfig, dtype: np.dtype[Any]) -> None:
        self.graph = graph
        self.model = model
        self.numpy_type = dtype
        self.dtype = ir.DataType.from_numpy(dtype)

    @abstractmethod
    def prepare(self, inputs: StepInputs, cache: ir.Value) -> None:
        """Compute once what every layer needs: the mask and the rows of the rotary table."""

    @abstractmethod
    def normalise(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Divide by the root mean square over the last axis and multiply by a weight."""

    @abstractmethod
    def rotate(self, heads: ir.Value) -> ir.Value:
        """Turn the leading elements of each head by its position."""

    @abstractmethod
    def attend(self, layer: int, q: ir.Value, new: KeyValue, cache: KeyValue) -> ir.Value:
        """Attend over the filled slots and the new rows; declares the layer's cache outputs."""

    def rotary_rows(self, inputs: StepInputs) -> tuple[ir.Value, ir.Value]:
        """Cosine and sine of each token of the step [B, S, rotary / 2], in the graph's type."""
        rows = [self.graph.op("Gather", table, inputs.positions) for table in inputs[-2:]]
        if self.dtype != ir.DataType.FLOAT:
            rows = [self.cast(row, self.dtype) for row in rows]
        return rows[0], rows[1]

    @property
    def group_size(self) -> int:
        """G, the query heads that share a K/V head."""
        return self.model.num_attention_heads // self.model.num_kv_heads

    def group(self, q: ir.Value) -> ir.Value:
        """Stack query heads: [B, Hq, S, D] as [B, Hkv, G * S, D]."""
        return self._regroup(q, self.model.num_kv_heads)

    def ungroup(self, context: ir.Value) -> ir.Value:
        """The inverse of `group`."""
        return self._regroup(context, self.model.num_attention_heads)

    def _regroup(self, x: ir.Value, heads: int) -> ir.Value:
        if self.group_size == 1:
            return x
        return self.graph.op("Reshape", x, self.graph.ints(0, heads, -1, self.model.head_dim))

    def additive(self, visible: ir.Value) -> ir.Value:
        """What to add to scores: 0 where `visible`, a very negative number elsewhere."""
        # Half the smallest number: adding a score to it cannot overflow.
        hidden = float(np.finfo(self.numpy_type.name).min) / 2
        return self.graph.op("Where", visible, self.number(0.0), self.number(hidden))

    def number(self, value: float) -> ir.Value:
        """A scalar constant in the graph's type."""
        return self.graph.constant(np.array(value, self.numpy_type))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Convert to another type."""
        return self.graph.op("Cast", x, to=int(dtype))

    def length(self, x: ir.Value, axis: int) -> ir.Value:
        """One dimension of a tensor as an int64 scalar."""
        shape = self.graph.op("Shape", x, start=axis, end=axis + 1)
        return self.graph.op("Squeeze", shape, self.graph.ints(0))

    def range(self, length: ir.Value) -> ir.Value:
        """0, 1, 2 ... as int64."""
        zero, one = (self.graph.constant(np.array(n, np.int64)) for n in (0, 1))
        return self.graph.op("Range", zero, length, one)
