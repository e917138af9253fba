"""The classic dialect: opset 17 without fused operators, for runtimes that know no newer ones."""

from collections.abc import Sequence

import onnx_ir as ir

from runtime.export.spelling import BATCH, STEP, KeyValue, Spelling, StepInputs

OPSET = 17
QUANTIZED_OPSET = 21  # the first with blocked DequantizeLinear


class ClassicSpelling(Spelling):
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
        """What to add to scores among the step's tokens: [G * S, S], of a tree [B, 1, G * S, S]."""
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
