"""The classic dialect as TensorRT runs it with the fewest kernels; any builder from 8.6 on."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hearth.runtime.export.dialect import ClassicDialect, KeyValue, StepInputs


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
