"""Operators that the dialects of the decoder graph write differently."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.model_config import ModelConfig

_AXES_AS_INPUT = 18


class Operators:
    """Appends common expressions to a graph whose activations have one type."""

    def __init__(self, graph: GraphBuilder, dtype: np.dtype[Any]) -> None:
        self.graph = graph
        self.numpy_type = dtype
        self.dtype = ir.DataType.from_numpy(dtype)

    def gated(self, gate: ir.Value, up: ir.Value) -> ir.Value:
        """SiLU of the gate, times what it gates."""
        gate = self.graph.op("Mul", gate, self.graph.op("Sigmoid", gate))
        return self.graph.op("Mul", gate, up)

    def normalise_root(
        self, x: ir.Value, weight: ir.Value, epsilon: float, *, center: bool = False
    ) -> ir.Value:
        """Divide by the root mean square over the last axis, in float32, and multiply.

        With `center` the mean is taken off before.
        """
        graph = self.graph
        wide = x if self.dtype == ir.DataType.FLOAT else self.cast(x, ir.DataType.FLOAT)
        if center:
            wide = graph.op("Sub", wide, self._mean(wide))
        least = graph.constant(np.array(epsilon, np.float32))
        root = graph.op("Sqrt", graph.op("Add", self._mean(self.square(wide)), least))
        normal = graph.op("Div", wide, root)
        if self.dtype != ir.DataType.FLOAT:
            normal = self.cast(normal, self.dtype)
        return graph.op("Mul", normal, weight)

    def square(self, x: ir.Value) -> ir.Value:
        """The square of each element."""
        return self.graph.op("Pow", x, self.graph.constant(np.array(2, np.float32)))

    def additive(self, visible: ir.Value) -> ir.Value:
        """Additive mask of scores: 0 where `visible`, `lowest` elsewhere."""
        return self.graph.op("Where", visible, self.number(0.0), self.number(self.lowest))

    @property
    def lowest(self) -> float:
        """Additive mask of a hidden score: half the lowest number, so that no sum overflows."""
        return float(ml_dtypes.finfo(self.numpy_type).min) / 2

    def number(self, value: float) -> ir.Value:
        """A scalar constant in the graph's type."""
        return self.graph.constant(np.array(value, self.numpy_type))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Convert to another type."""
        return self.graph.op("Cast", x, to=int(dtype))

    def _mean(self, x: ir.Value) -> ir.Value:
        if self.graph.opset < _AXES_AS_INPUT:
            return self.graph.op("ReduceMean", x, axes=[-1], keepdims=1)
        return self.graph.op("ReduceMean", x, self.graph.ints(-1), keepdims=1)


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


class GraphDialect(Operators, ABC):
    """Normalisation, rotation and attention as one dialect writes them.

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


NATIVE_OPSET = 24


class NativeDialect(GraphDialect):
    """Standard operators that ONNX Runtime 1.24 and TensorRT 10.15 read."""

    index_type = ir.DataType.INT64

    def prepare(self, inputs: StepInputs, cache: ir.Value) -> None:
        """Mask [B, 1, G * S, C]: a query sees every slot up to its own, or those of its path.

        It is added, not boolean: ONNX Runtime would widen a boolean mask again in every layer.
        """
        self._start = inputs.start
        self._cos, self._sin = self.rotary_rows(inputs)
        slots = self.range(self.length(cache, 2))
        if inputs.mask is None:
            self._mask = self._causal(inputs, slots)
        else:
            self._mask = self._tree(inputs, inputs.mask, slots)

    def _causal(self, inputs: StepInputs, slots: ir.Value) -> ir.Value:
        graph = self.graph
        step = self.range(self.length(inputs.embeds, 1))
        own = graph.op("Add", graph.op("Unsqueeze", inputs.start, graph.ints(1)), step)
        own = graph.op("Unsqueeze", own, graph.ints(1, 3))
        mask = self.additive(graph.op("LessOrEqual", slots, own))
        return graph.op("Tile", mask, graph.ints(1, 1, self.group_size, 1))

    def _tree(self, inputs: StepInputs, tree: ir.Value, slots: ir.Value) -> ir.Value:
        """Each slot takes a row of a table: that of filled slots, of a token, or of the others.

        The table is [B, 1 + S + 1, G * S], with a column for each query.
        """
        graph = self.graph
        seen = graph.op("Transpose", self.additive(tree), perm=[0, 2, 1])
        seen = graph.op("Tile", seen, graph.ints(1, 1, self.group_size))
        table = graph.op("Pad", seen, graph.ints(0, 1, 0, 0, 0, 0), self.number(0.0))
        hidden = self.number(self.lowest)
        table = graph.op("Pad", table, graph.ints(0, 0, 0, 0, 1, 0), hidden)
        begin = graph.op("Sub", inputs.start, graph.ints(1))
        rows = graph.op("Sub", slots, graph.op("Unsqueeze", begin, graph.ints(1)))
        last = graph.op("Sub", graph.op("Shape", table, start=1, end=2), graph.ints(1))
        rows = graph.op("Min", graph.op("Max", rows, graph.ints(0)), last)
        mask = graph.op("GatherND", table, graph.op("Unsqueeze", rows, graph.ints(2)), batch_dims=1)
        return graph.op("Unsqueeze", graph.op("Transpose", mask, perm=[0, 2, 1]), graph.ints(1))

    def normalise(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """One RMSNormalization."""
        return self.graph.op("RMSNormalization", x, weight, epsilon=self.model.rms_norm_eps)

    def rotate(self, heads: ir.Value) -> ir.Value:
        """One RotaryEmbedding."""
        return self.graph.op("RotaryEmbedding", heads, self._cos, self._sin)

    def attend(self, layer: int, q: ir.Value, new: KeyValue, cache: KeyValue) -> ir.Value:
        """Write the new rows into the cache, whose output has the address of its input."""
        k = self._scatter(f"present_k_cache_{layer}", cache.k, new.k)
        v = self._scatter(f"present_v_cache_{layer}", cache.v, new.v)
        scale = self.model.head_dim**-0.5
        return self.ungroup(
            self.graph.op("Attention", self.group(q), k, v, self._mask, scale=scale)
        )

    def _scatter(self, name: str, cache: ir.Value, rows: ir.Value) -> ir.Value:
        filled = self.graph.op("TensorScatter", cache, rows, self._start, axis=-2)
        shape = (BATCH, self.model.num_kv_heads, self.capacity, self.model.head_dim)
        self.graph.output(filled, name, self.dtype, shape)
        return filled


CLASSIC_OPSET = 17
QUANTIZED_OPSET = 21  # the first with blocked DequantizeLinear


class ClassicDialect(GraphDialect):
    """Attention in two parts, over the cache and over the step's own rows, under one softmax."""

    index_type = ir.DataType.INT32

    def prepare(self, inputs: StepInputs, cache: ir.Value) -> None:
        """Rotary factors [B, 1, S, D], and what to add to the two parts of the scores.

        Scores are [B, Hkv, G * S, C] and [B, Hkv, G * S, S], masks [B, 1, 1, C] and [G * S, S],
        or [B, 1, G * S, S] of a tree.
        """
        graph = self.graph
        self._turn, self._cross = self._rotary_factors(*self.rotary_rows(inputs))
        start = self.cast(inputs.start, ir.DataType.INT64)
        start = graph.op("Unsqueeze", start, graph.ints(1, 2, 3))
        slots = self.range(self.length(cache, 2))
        self._filled = self.additive(graph.op("Less", slots, start))
        step = self.range(self.length(inputs.embeds, 1))
        self._own = self.own_mask(inputs, step)
        lengths = (graph.op("Shape", slots), graph.op("Shape", step))
        self._parts = graph.op("Concat", *lengths, axis=0)

    def own_mask(self, inputs: StepInputs, step: ir.Value) -> ir.Value:
        """Additive mask among the step's tokens: [G * S, S], of a tree [B, 1, G * S, S]."""
        graph = self.graph
        if inputs.mask is not None:
            tree = self.additive(inputs.mask)
            tree = graph.op("Tile", tree, graph.ints(1, self.group_size, 1))
            return graph.op("Unsqueeze", tree, graph.ints(1))
        own = graph.op("Unsqueeze", step, graph.ints(1))
        causal = self.additive(graph.op("LessOrEqual", step, own))
        return graph.op("Tile", causal, graph.ints(self.group_size, 1))

    def normalise(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Root mean square in float32, whatever the graph's type."""
        return self.normalise_root(x, weight, self.model.rms_norm_eps)

    def halves(self, heads: ir.Value) -> Sequence[ir.Value]:
        """The two halves of each head."""
        graph, half = self.graph, self.model.head_dim // 2
        return graph.ops("Split", 2, heads, graph.ints(half, half), axis=-1)

    def rotate(self, heads: ir.Value) -> ir.Value:
        """Return x * turn + swap(x) * cross, where swap exchanges the two halves."""
        graph = self.graph
        first, second = self.halves(heads)
        swapped = graph.op("Concat", second, first, axis=-1)
        turned = graph.op("Mul", heads, self._turn)
        return graph.op("Add", turned, graph.op("Mul", swapped, self._cross))

    def attend(self, layer: int, q: ir.Value, new: KeyValue, cache: KeyValue) -> ir.Value:
        """Attend in two parts; the runtime writes the new rows into the cache after the step."""
        graph, model = self.graph, self.model
        self.output_rows(layer, new)
        q = graph.op("Mul", q, self.number(model.head_dim**-0.5))
        old, own = self._shares(self.group(q), cache.k, new.k)
        mixed = graph.op("Add", graph.op("MatMul", old, cache.v), graph.op("MatMul", own, new.v))
        return self.ungroup(mixed)

    def output_rows(self, layer: int, new: KeyValue) -> None:
        """Output the new rows of a layer in the type of the caches."""
        shape = (BATCH, self.model.num_kv_heads, STEP, self.model.head_dim)
        for kind, rows in zip("kv", new, strict=True):
            wanted = rows if self.cache_dtype == self.dtype else self.cast(rows, self.cache_dtype)
            self.graph.output(wanted, f"present_{kind}_cache_{layer}", self.cache_dtype, shape)

    def _shares(self, q: ir.Value, old: ir.Value, own: ir.Value) -> Sequence[ir.Value]:
        graph = self.graph
        scores = []
        for keys, mask in ((old, self._filled), (own, self._own)):
            columns = graph.op("Transpose", keys, perm=[0, 1, 3, 2])
            scores.append(graph.op("Add", graph.op("MatMul", q, columns), mask))
        shares = graph.op("Softmax", graph.op("Concat", *scores, axis=-1), axis=-1)
        return graph.ops("Split", 2, shares, self._parts, axis=-1)

    def _rotary_factors(self, cos: ir.Value, sin: ir.Value) -> tuple[ir.Value, ir.Value]:
        graph = self.graph
        turn, cross = [cos, cos], [graph.op("Neg", sin), sin]
        heads = graph.ints(1)
        rows = [graph.op("Concat", *factors, axis=-1) for factors in (turn, cross)]
        return graph.op("Unsqueeze", rows[0], heads), graph.op("Unsqueeze", rows[1], heads)


class PrimitiveDialect(ClassicDialect):
    """Matrix products and one softmax a layer; a cache has a fixed number of slots.

    TensorRT 8.6 runs next to every node that it cannot merge as a kernel of its own, so queries
    and keys are normed and turned together, halves are turned without a swapped copy, and the
    mask is added once, to the scores of cache and step side by side.
    """

    def prepare(self, inputs: StepInputs, _cache: ir.Value) -> None:
        """Rotary rows [B, 1, S, D / 2], and the mask [B, 1, G * S, C + S] of all layers."""
        graph, slots = self.graph, int(self.capacity)
        self._cos, self._sin = (
            graph.op("Unsqueeze", row, graph.ints(1)) for row in self.rotary_rows(inputs)
        )
        start = graph.op("Unsqueeze", inputs.start, graph.ints(1, 2, 3))
        numbers = graph.table("slots", np.arange(slots, dtype=np.int32))
        filled = self.additive(graph.op("Less", numbers, start))
        own = self.own_mask(inputs, self.range(self.length(inputs.embeds, 1)))
        rows = graph.op("Shape", inputs.start)
        axis = 0 if inputs.mask is None else 2
        queries = graph.op("Gather", graph.op("Shape", own), graph.ints(axis))
        wide = graph.op("Concat", rows, graph.ints(1), queries, graph.ints(slots), axis=0)
        if inputs.mask is None:
            near = graph.op("Concat", rows, graph.ints(1), graph.op("Shape", own), axis=0)
            own = graph.op("Expand", own, near)
        self._mask = graph.op("Concat", graph.op("Expand", filled, wide), own, axis=-1)

    def length(self, x: ir.Value, axis: int) -> ir.Value:
        """One dimension of a tensor as an int64 scalar; TensorRT 8.6 knows no partial Shape."""
        shape = self.graph.op("Shape", x)
        return self.graph.op("Gather", shape, self.graph.constant(np.array(axis, np.int64)))

    def square(self, x: ir.Value) -> ir.Value:
        """The square of each element, by a product."""
        return self.graph.op("Mul", x, x)

    def heads(
        self, heads: ir.Value, counts: tuple[int, int, int], norms: Sequence[ir.Value]
    ) -> tuple[ir.Value, KeyValue]:
        """Queries and keys in one piece as long as both are treated alike."""
        graph, (queries, keys, values) = self.graph, counts
        both, v = graph.ops("Split", 2, heads, graph.ints(queries + keys, values), axis=1)
        if norms:
            both = self.normalise(both, self._joined(norms, (queries, keys)))
        q, k = graph.ops("Split", 2, self.rotate(both), graph.ints(queries, keys), axis=1)
        return q, KeyValue(k, v)

    def rotate(self, heads: ir.Value) -> ir.Value:
        """Turn the two halves by each other."""
        first, second = self.halves(heads)
        low = self._turn_half("Sub", first, second)
        high = self._turn_half("Add", second, first)
        return self.graph.op("Concat", low, high, axis=-1)

    def attend(self, layer: int, q: ir.Value, new: KeyValue, cache: KeyValue) -> ir.Value:
        """Attend under one mask; the runtime writes the new rows into the cache after the step."""
        graph, model, slots = self.graph, self.model, int(self.capacity)
        self.output_rows(layer, new)
        q = self.group(graph.op("Mul", q, self.number(model.head_dim**-0.5)))
        columns = [graph.op("Transpose", keys, perm=[0, 1, 3, 2]) for keys in (cache.k, new.k)]
        scores = graph.op("Concat", *(graph.op("MatMul", q, one) for one in columns), axis=-1)
        shares = graph.op("Softmax", graph.op("Add", scores, self._mask), axis=-1)
        old = self._part(shares, 0, slots)
        own = self._part(shares, slots, np.iinfo(np.int64).max)
        mixed = graph.op("Add", graph.op("MatMul", old, cache.v), graph.op("MatMul", own, new.v))
        return self.ungroup(mixed)

    def _turn_half(self, sign: str, x: ir.Value, other: ir.Value) -> ir.Value:
        graph = self.graph
        kept, crossed = graph.op("Mul", x, self._cos), graph.op("Mul", other, self._sin)
        return graph.op(sign, kept, crossed)

    def _part(self, x: ir.Value, begin: int, end: int) -> ir.Value:
        ints = self.graph.ints
        return self.graph.op("Slice", x, ints(begin), ints(end), ints(-1))

    def _joined(self, norms: Sequence[ir.Value], counts: tuple[int, int]) -> ir.Value:
        # [queries + keys, 1, D]: each head's own weight.
        graph, pairs = self.graph, list(zip(norms, counts, strict=True))
        if any(norm.const_value is None for norm in norms):
            shapes = (graph.ints(count, 1, self.model.head_dim) for count in counts)
            parts = map(graph.op, ("Expand", "Expand"), norms, shapes)
            return graph.op("Concat", *parts, axis=0)
        rows = [
            np.tile(np.asarray(norm.const_value.numpy()), (count, 1, 1))
            for norm, count in pairs
            if norm.const_value is not None
        ]
        return graph.vector(graph.scoped("qk_norm"), np.concatenate(rows))
