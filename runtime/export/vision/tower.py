"""The graph of a vision tower, from 8-bit patches to embeddings of tokens."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.vision.dialect import Rotary, VisionDialect
from hearth.runtime.export.vision.layout import Merger, has_bias, tower_names
from hearth.runtime.export.weights import Projection, Weights, row_pieces
from hearth.runtime.tensors.tensor import numpy_dtype

# Symbolic dimensions.
PATCHES, TOKENS = "patches", "tokens"


class Tower:
    """Writes a tower of any family into a graph; docs/vision.md lists the bindings."""

    def __init__(
        self,
        graph: GraphBuilder,
        dialect: VisionDialect,
        checkpoint: Checkpoint,
        weights: Weights,
    ) -> None:
        self._graph = graph
        self._dialect = dialect
        self._checkpoint = checkpoint
        self._weights = weights
        self._tower = dialect.tower
        self._config = dialect.tower.config
        self._names = tower_names(dialect.tower)
        native = self._config.dialect == "native"
        self._index = ir.DataType.INT64 if native else ir.DataType.INT32

    def build(self) -> None:
        """Append everything; weights are written to the data file on the way."""
        graph, config = self._graph, self._config
        x = self._embed()
        segments = self._input("segment_ids", self._index)
        masks = [self._dialect.mask(segments)] * config.num_layers
        if config.window_size:
            window = self._dialect.mask(self._input("window_ids", self._index))
            for layer in {*range(config.num_layers)} - {*config.full_attention_layers}:
                masks[layer] = window
        self._dialect.prepare(self._rotary())
        first, *others = self._names.mergers
        features = iter(enumerate(others))
        for layer, mask in enumerate(masks):
            with graph.scope(f"layers.{layer}"):
                x = self._layer(layer, x, mask)
            if layer in config.deepstack_layers:
                number, merger = next(features)
                self._output(f"deepstack_{number}", x, merger)
        self._output("embeddings", x, first)

    def _embed(self) -> ir.Value:
        """Patches, scaled and normalised, as elements [T, H] with what tells their position."""
        graph, config, dtype = self._graph, self._config, self._dialect.dtype
        patches = graph.input("patches", ir.DataType.UINT8, (PATCHES, config.patch_bytes))
        rules, pixels = config.rules, config.patch_bytes // 3
        std = np.array(rules.std)
        slope, offset = (
            graph.vector(name, np.repeat(values, pixels).astype(np.float32))
            for name, values in (("slope", rules.scale / std), ("offset", rules.mean / std))
        )
        x = self._dialect.cast(patches, ir.DataType.FLOAT)
        x = graph.op("Sub", graph.op("Mul", x, slope), offset)
        if dtype != ir.DataType.FLOAT:
            x = self._dialect.cast(x, dtype)
        x = self._linear(x, "patch", [self._names.patch], config.patch_bytes)
        if self._names.positions is None:
            return x
        return graph.op("Add", x, self._positions(self._names.positions))

    def _positions(self, source: str) -> ir.Value:
        """Learned positions [T, H]: one of the table, or four that are mixed."""
        graph, config, dtype = self._graph, self._config, self._dialect.dtype
        name, shape = f"{source}.weight", (config.position_side**2, config.hidden_size)
        pieces = row_pieces(self._checkpoint, name, shape, self._weights.dtype)
        table = graph.weight("positions", dtype, shape, pieces)
        count = 4 if config.family == "qwen3_vl" else 1
        ids = graph.input("position_ids", self._index, (count, PATCHES))
        rows = graph.op("Gather", table, ids)
        if count > 1:
            shares = graph.input("position_weights", ir.DataType.FLOAT, (count, PATCHES))
            if dtype != ir.DataType.FLOAT:
                shares = self._dialect.cast(shares, dtype)
            rows = graph.op("Mul", rows, graph.op("Unsqueeze", shares, graph.ints(2)))
        return graph.op("ReduceSum", rows, graph.ints(0), keepdims=0)

    def _input(self, name: str, dtype: ir.DataType, *sizes: int) -> ir.Value:
        return self._graph.input(name, dtype, (PATCHES, *sizes))

    def _rotary(self) -> Rotary | None:
        if self._config.family == "idefics3":
            return None
        half, number = self._config.head_dim // 2, ir.DataType.FLOAT
        return Rotary(*(self._input(f"rotary_{name}", number, half) for name in ("cos", "sin")))

    def _layer(self, layer: int, x: ir.Value, mask: ir.Value) -> ir.Value:
        graph, names, hidden = self._graph, self._names, self._config.hidden_size
        prefix = names.layer.format(layer)
        normal = self._normalise(x, f"{prefix}.{names.norms[0]}")
        qkv = self._linear(normal, "qkv", [f"{prefix}.{part}" for part in names.qkv], hidden)
        context = self._dialect.attention(qkv, mask)
        x = graph.op(
            "Add", x, self._linear(context, "output", [f"{prefix}.{names.attended}"], hidden)
        )
        normal = self._normalise(x, f"{prefix}.{names.norms[1]}")
        *ups, down = (f"{prefix}.{part}" for part in names.mlp)
        inner = self._linear(normal, "up", ups, hidden)
        size = self._tower.intermediate_size
        if self._tower.is_gated:
            inner = self._dialect.gated(
                *graph.ops("Split", 2, inner, graph.ints(size, size), axis=-1)
            )
        else:
            inner = self._dialect.activate(inner, self._tower.activation)
        return graph.op("Add", x, self._linear(inner, "down", [down], size))

    def _output(self, name: str, x: ir.Value, merger: Merger) -> None:
        """Tokens [tokens, output size] of the patches of each."""
        graph, size = self._graph, self._tower.merged_size
        with graph.scope(name):
            if not merger.joins:
                x = self._normalise(x, merger.norm)
            x = graph.op("Reshape", x, graph.ints(-1, size))
            if merger.joins:
                x = self._normalise(x, merger.norm)
            *inner, last = merger.products
            for source in inner:
                x = self._dialect.gelu(self._linear(x, "up", [source], size))
            x = self._linear(x, "down", [last], size)
        given = ir.DataType.from_numpy(numpy_dtype(self._config.embedding_dtype))
        if given != self._dialect.dtype:
            x = self._dialect.cast(x, given)
        graph.output(x, name, given, (TOKENS, self._config.output_size))

    def _normalise(self, x: ir.Value, source: str) -> ir.Value:
        weight = self._weights.vector(self._graph, source, [f"{source}.weight"])
        bias = self._bias(source, [source])
        return self._dialect.normalise(x, weight, bias)

    def _linear(self, x: ir.Value, name: str, sources: Sequence[str], width: int) -> ir.Value:
        """Projections of x [..., width] side by side, with their biases if they have any."""
        name = self._graph.scoped(name)
        matrices = [f"{source}.weight" for source in sources]
        size = sum(self._checkpoint.shape(matrix)[0] for matrix in matrices)
        product = self._weights.project(self._graph, x, Projection(name, matrices, (width, size)))
        bias = self._bias(name, sources)
        return product if bias is None else self._graph.op("Add", product, bias)

    def _bias(self, name: str, sources: Sequence[str]) -> ir.Value | None:
        if not has_bias(self._tower, sources[0]):
            return None
        return self._weights.vector(
            self._graph, f"{name}_bias", [f"{source}.bias" for source in sources]
        )
