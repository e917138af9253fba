"""What the two dialects of the graph spell differently."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from runtime.export.graph import GraphBuilder
from runtime.export.model_config import ModelConfig
from runtime.export.operators import Operators

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
    mask: ir.Value | None = None
    """[B, S, S] bool: which tokens of the step each of them sees; None where it is causal."""
    deepstack: tuple[ir.Value, ...] = ()
    """[B, S, H] each: what is added to the residual stream behind the first layers."""


class KeyValue(NamedTuple):
    """Keys and values: the rows of a step or a whole cache, each [B, Hkv, slots, D]."""

    k: ir.Value
    v: ir.Value


class Spelling(Operators, ABC):
    """How one dialect writes normalisation, rotation and attention.

    Activations are [B, S, H], heads [B, heads, S, D] and caches [B, Hkv, C, D]. The G query heads
    that share a K/V head are attended to as rows of one head, so that keys and values are read
    once and not G times.
    """

    index_type: ir.DataType
    capacity: int | str = CAPACITY
    """Slots of a cache, and `positions` of the rotary table: a symbol where any number serves."""
    positions: int | str = POSITIONS

    def __init__(self, graph: GraphBuilder, model: ModelConfig, dtype: np.dtype[Any]) -> None:
        super().__init__(graph, dtype)
        self.model = model
        self.cache_dtype = self.dtype

    @abstractmethod
    def prepare(self, inputs: StepInputs, cache: ir.Value) -> None:
        """Compute once what every layer needs: the mask and the rows of the rotary table."""

    @abstractmethod
    def normalise(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Divide by the root mean square over the last axis and multiply by a weight."""

    @abstractmethod
    def rotate(self, heads: ir.Value) -> ir.Value:
        """Turn each head by its position."""

    @abstractmethod
    def attend(self, layer: int, q: ir.Value, new: KeyValue, cache: KeyValue) -> ir.Value:
        """Attend over the filled slots and the new rows; declares the layer's cache outputs."""

    def add_normalise(
        self, x: ir.Value, addend: ir.Value, weight: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """The sum, and the sum normalised."""
        total = self.graph.op("Add", x, addend)
        return total, self.normalise(total, weight)

    def self_attention(
        self, layer: int, qkv: ir.Value, norms: Sequence[ir.Value], cache: KeyValue
    ) -> ir.Value:
        """Context [B, S, query size] of projected queries, keys and values side by side."""
        graph, model = self.graph, self.model
        counts = (model.num_attention_heads, model.num_kv_heads, model.num_kv_heads)
        heads = graph.op("Reshape", qkv, graph.ints(0, 0, sum(counts), model.head_dim))
        heads = graph.op("Transpose", heads, perm=[0, 2, 1, 3])
        q, new = self.heads(heads, counts, norms)
        context = graph.op("Transpose", self.attend(layer, q, new, cache), perm=[0, 2, 1, 3])
        return graph.op("Reshape", context, graph.ints(0, 0, model.query_size))

    def heads(
        self, heads: ir.Value, counts: tuple[int, int, int], norms: Sequence[ir.Value]
    ) -> tuple[ir.Value, KeyValue]:
        """Query, key and value heads of [B, all heads, S, D], the first two normed and turned.

        `counts` are the heads of each; `norms` the weights for queries and keys, if there are.
        """
        q, k, v = self.graph.ops("Split", 3, heads, self.graph.ints(*counts), axis=1)
        if norms:
            q, k = self.normalise(q, norms[0]), self.normalise(k, norms[1])
        return self.rotate(q), KeyValue(self.rotate(k), v)

    def rotary_rows(self, inputs: StepInputs) -> tuple[ir.Value, ir.Value]:
        """Cosine and sine of each token of the step [B, S, rotary / 2], in the graph's type."""
        graph, positions, kind = self.graph, inputs.positions, "Gather"
        own: dict[str, int] = {}
        if self.model.rope_per_row:
            kind, own = "GatherND", {"batch_dims": 1}
            if self.index_type != ir.DataType.INT64:
                positions = self.cast(positions, ir.DataType.INT64)
            positions = graph.op("Unsqueeze", positions, graph.ints(-1))
        rows = [graph.op(kind, table, positions, **own) for table in (inputs.cos, inputs.sin)]
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

    def length(self, x: ir.Value, axis: int) -> ir.Value:
        """One dimension of a tensor as an int64 scalar."""
        shape = self.graph.op("Shape", x, start=axis, end=axis + 1)
        return self.graph.op("Squeeze", shape, self.graph.ints(0))

    def range(self, length: ir.Value) -> ir.Value:
        """0, 1, 2 ... as int64."""
        zero, one = (self.graph.constant(np.array(n, np.int64)) for n in (0, 1))
        return self.graph.op("Range", zero, length, one)
