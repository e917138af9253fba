"""The native dialect: opset 24, caches written in place by TensorScatter, one Attention a layer."""

import onnx_ir as ir

from runtime.export.spelling import BATCH, KeyValue, Spelling, StepInputs

OPSET = 24


class NativeSpelling(Spelling):
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
