"""The native dialect for token trees by ONNX Runtime's own operators, for its CUDA provider."""

from collections.abc import Sequence

import onnx_ir as ir

from runtime.export.contrib import CONTRIB, ContribSpelling
from runtime.export.spelling import BATCH, KeyValue, StepInputs


class TreeSpelling(ContribSpelling):
    """Two matrix products and a softmax a layer, of any number of rows and tokens.

    The fused attention of ONNX Runtime sees no tree. No operator here copies from the host while
    it runs, so a step can be captured: nothing is split or joined in unequal pieces, and the new
    rows are scattered into the cache, whose output has the address of its input.
    """

    joins_qkv = False

    def prepare(self, inputs: StepInputs, cache: ir.Value) -> None:
        """Where the new rows go [B, S, Hkv, 3], the mask [B, 1, G * S, C], rotary tables."""
        graph = self.graph
        self.prepare_rotation(inputs)
        step = self.range(self.length(inputs.embeds, 1))
        slots = graph.op("Add", graph.op("Unsqueeze", inputs.start, graph.ints(1)), step)
        row = graph.op("Unsqueeze", self.range(self.length(inputs.embeds, 0)), graph.ints(1))
        row = graph.op("Expand", row, graph.op("Shape", slots))
        self._mask = self._tree_mask(inputs, cache, (row, slots))
        self._places = self._every_head((row, slots))

    def self_attention(
        self, layer: int, qkv: Sequence[ir.Value], norms: Sequence[ir.Value], cache: KeyValue
    ) -> ir.Value:
        """Queries, keys and values come apart; caches are written in place."""
        graph, model = self.graph, self.model
        q, k = self.turned_heads(qkv, norms)
        keys = self._write(f"present_k_cache_{layer}", cache.k, k)
        values = self._write(f"present_v_cache_{layer}", cache.v, qkv[2])
        scale = model.head_dim**-0.5
        scores = graph.op(f"{CONTRIB}::FusedMatMul", self._rows(q), keys, transB=1, alpha=scale)
        shares = graph.op("Softmax", graph.op("Add", scores, self._mask), axis=-1)
        return self._tokens(graph.op("MatMul", shares, values))

    def _tree_mask(
        self, inputs: StepInputs, cache: ir.Value, place: tuple[ir.Value, ir.Value]
    ) -> ir.Value:
        """What to add to scores: of filled slots 0, of the step's slots what the tree says."""
        graph = self.graph
        if inputs.mask is None:
            raise NotImplementedError("this spelling is for engines that take a tree mask")
        seen = graph.op("Transpose", self.additive(inputs.mask), perm=[0, 2, 1])
        seen = graph.op("Tile", seen, graph.ints(1, 1, self.group_size))
        start = graph.op("Unsqueeze", inputs.start, graph.ints(1))
        slots = self.range(self.length(cache, 2))
        filled = graph.op("Unsqueeze", graph.op("Less", slots, start), graph.ints(2))
        shape = (
            graph.op("Shape", cache, start=0, end=1),
            graph.op("Shape", cache, start=2, end=3),
            graph.op("Shape", seen, start=2, end=3),
        )
        every = graph.op("Expand", self.additive(filled), graph.op("Concat", *shape, axis=0))
        mask = graph.op("ScatterND", every, self._joined(place, 2), seen)
        return graph.op("Unsqueeze", graph.op("Transpose", mask, perm=[0, 2, 1]), graph.ints(1))

    def _every_head(self, place: tuple[ir.Value, ir.Value]) -> ir.Value:
        graph, count = self.graph, self.model.num_kv_heads
        shape = graph.op("Concat", graph.op("Shape", place[0]), graph.ints(count), axis=0)
        row, slot = (
            graph.op("Expand", graph.op("Unsqueeze", one, graph.ints(2)), shape) for one in place
        )
        head = graph.op("Expand", graph.ints(*range(count)), shape)
        return self._joined((row, head, slot), 3)

    def _joined(self, indices: Sequence[ir.Value], axis: int) -> ir.Value:
        last = (self.graph.op("Unsqueeze", one, self.graph.ints(axis)) for one in indices)
        return self.graph.op("Concat", *last, axis=axis)

    def _write(self, name: str, cache: ir.Value, rows: ir.Value) -> ir.Value:
        graph, model = self.graph, self.model
        rows = graph.op("Reshape", rows, graph.ints(0, 0, model.num_kv_heads, model.head_dim))
        written = graph.op("ScatterND", cache, self._places, rows)
        shape = (BATCH, model.num_kv_heads, self.capacity, model.head_dim)
        graph.output(written, name, self.dtype, shape)
        return written

    def _rows(self, q: ir.Value) -> ir.Value:
        """Queries [B, S, query size] as rows of the heads that they share: [B, Hkv, G * S, D]."""
        graph, model = self.graph, self.model
        parts = graph.ints(0, 0, model.num_kv_heads, self.group_size, model.head_dim)
        q = graph.op("Transpose", graph.op("Reshape", q, parts), perm=[0, 2, 3, 1, 4])
        return graph.op("Reshape", q, graph.ints(0, model.num_kv_heads, -1, model.head_dim))

    def _tokens(self, context: ir.Value) -> ir.Value:
        """The inverse of `_rows`."""
        graph, model = self.graph, self.model
        parts = graph.ints(0, model.num_kv_heads, self.group_size, -1, model.head_dim)
        context = graph.op("Transpose", graph.op("Reshape", context, parts), perm=[0, 3, 1, 2, 4])
        return graph.op("Reshape", context, graph.ints(0, 0, model.query_size))
