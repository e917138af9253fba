"""The graph of a vision tower, in each dialect, from 8-bit patches to embeddings of tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.dialect import Operators
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.vision.layout import Merger, has_bias, tower_names
from hearth.runtime.export.vision.tower_model import Activation, TowerModel
from hearth.runtime.export.weights import Projection, Weights, row_pieces
from hearth.runtime.tensors.tensor import numpy_dtype

_HALF_ROOT = 0.5**0.5
_TANH_SCALE, _TANH_CUBE = (2 / np.pi) ** 0.5, 0.044715


class Rotary(NamedTuple):
    """Cosine and sine of each patch [T, D / 2], float32."""

    cos: ir.Value
    sin: ir.Value


class VisionDialect(Operators, ABC):
    """Norms, activations and attention of patches [T, H], heads [1, N, T, D]."""

    def __init__(self, graph: GraphBuilder, tower: TowerModel, dtype: np.dtype[Any]) -> None:
        super().__init__(graph, dtype)
        self.tower = tower
        self.heads, self.head_dim = tower.config.num_heads, tower.config.head_dim
        self.cos: ir.Value | None = None
        self.sin: ir.Value | None = None

    def prepare(self, rotary: Rotary | None) -> None:
        """Bring the rotary tables of all layers into shape; None for a tower that does not turn."""
        if rotary is not None:
            self.cos, self.sin = (self._table(table) for table in rotary)

    def normalise(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Layer normalisation, or by the root mean square where there is no bias."""
        if bias is None:
            return self.normalise_root(x, weight, self.tower.norm_eps)
        return self.graph.op("LayerNormalization", x, weight, bias, epsilon=self.tower.norm_eps)

    def activate(self, x: ir.Value, kind: Activation) -> ir.Value:
        """One of the activations; SiLU is that of a gate, `gated`."""
        return self.gelu_tanh(x) if kind == "gelu_tanh" else self.gelu(x)

    def mask(self, ids: ir.Value) -> ir.Value:
        """Additive mask of scores [1, 1, T, T]: patches see those of the same `ids` [T] alone."""
        graph = self.graph
        rows, columns = (graph.op("Unsqueeze", ids, graph.ints(axis)) for axis in (1, 0))
        mask = self.additive(graph.op("Equal", rows, columns))
        return graph.op("Unsqueeze", mask, graph.ints(0, 1))

    def attention(self, qkv: ir.Value, mask: ir.Value) -> ir.Value:
        """Context [T, H] of projected queries, keys and values side by side [T, 3H]."""
        graph, heads = self.graph, self.heads
        parts = graph.op("Reshape", qkv, graph.ints(1, -1, 3 * heads, self.head_dim))
        parts = graph.op("Transpose", parts, perm=[0, 2, 1, 3])
        if self.cos is None:
            q, k, v = graph.ops("Split", 3, parts, graph.ints(heads, heads, heads), axis=1)
        else:
            both, v = graph.ops("Split", 2, parts, graph.ints(2 * heads, heads), axis=1)
            q, k = graph.ops("Split", 2, self.rotate(both), graph.ints(heads, heads), axis=1)
        context = graph.op("Transpose", self.attend(q, k, v, mask), perm=[0, 2, 1, 3])
        return graph.op("Reshape", context, graph.ints(-1, heads * self.head_dim))

    @abstractmethod
    def gelu(self, x: ir.Value) -> ir.Value:
        """The exact activation."""

    @abstractmethod
    def gelu_tanh(self, x: ir.Value) -> ir.Value:
        """GELU, approximated by a hyperbolic tangent."""

    @abstractmethod
    def rotate(self, heads: ir.Value) -> ir.Value:
        """Turn the halves of each head by each other."""

    @abstractmethod
    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value) -> ir.Value:
        """Attention of every head."""

    def _table(self, table: ir.Value) -> ir.Value:
        if self.dtype != ir.DataType.FLOAT:
            table = self.cast(table, self.dtype)
        return self.graph.op("Unsqueeze", table, self.graph.ints(0))


class NativeVisionDialect(VisionDialect):
    """Opset 24: one operator for each."""

    def normalise(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """One LayerNormalization or RMSNormalization."""
        if bias is None:
            return self.graph.op("RMSNormalization", x, weight, epsilon=self.tower.norm_eps)
        return super().normalise(x, weight, bias)

    def gelu(self, x: ir.Value) -> ir.Value:
        """One Gelu."""
        return self.graph.op("Gelu", x)

    def gelu_tanh(self, x: ir.Value) -> ir.Value:
        """One Gelu that approximates."""
        return self.graph.op("Gelu", x, approximate="tanh")

    def rotate(self, heads: ir.Value) -> ir.Value:
        """One RotaryEmbedding."""
        return self.graph.op("RotaryEmbedding", heads, self.cos, self.sin)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value) -> ir.Value:
        """One Attention."""
        return self.graph.op("Attention", q, k, v, mask, scale=self.head_dim**-0.5)


class ClassicVisionDialect(VisionDialect):
    """Opset 17, which every version of ONNX Runtime and TensorRT reads."""

    def prepare(self, rotary: Rotary | None) -> None:
        """Tables [1, 1, T, D / 2]."""
        super().prepare(rotary)
        if self.cos is not None and self.sin is not None:
            heads = self.graph.ints(0)
            self.cos = self.graph.op("Unsqueeze", self.cos, heads)
            self.sin = self.graph.op("Unsqueeze", self.sin, heads)

    def gelu(self, x: ir.Value) -> ir.Value:
        """By the error function."""
        spread = self.graph.op("Erf", self.graph.op("Mul", x, self.number(_HALF_ROOT)))
        return self._half(x, spread)

    def gelu_tanh(self, x: ir.Value) -> ir.Value:
        """By the hyperbolic tangent of x * (1 + c * x^2), whose infinities are harmless."""
        graph = self.graph
        slope = graph.op("Mul", graph.op("Mul", x, x), self.number(_TANH_SCALE * _TANH_CUBE))
        slope = graph.op("Add", slope, self.number(_TANH_SCALE))
        return self._half(x, graph.op("Tanh", graph.op("Mul", x, slope)))

    def rotate(self, heads: ir.Value) -> ir.Value:
        """Four products."""
        graph, half = self.graph, self.head_dim // 2
        one, other = graph.ops("Split", 2, heads, graph.ints(half, half), axis=-1)
        low = graph.op("Sub", graph.op("Mul", one, self.cos), graph.op("Mul", other, self.sin))
        high = graph.op("Add", graph.op("Mul", other, self.cos), graph.op("Mul", one, self.sin))
        return graph.op("Concat", low, high, axis=-1)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value) -> ir.Value:
        """Two matrix products and a softmax."""
        graph = self.graph
        q = graph.op("Mul", q, self.number(self.head_dim**-0.5))
        scores = graph.op("MatMul", q, graph.op("Transpose", k, perm=[0, 1, 3, 2]))
        shares = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        return graph.op("MatMul", shares, v)

    def _half(self, x: ir.Value, spread: ir.Value) -> ir.Value:
        """Half of x, and of x times the spread."""
        graph = self.graph
        share = graph.op("Add", graph.op("Mul", spread, self.number(0.5)), self.number(0.5))
        return graph.op("Mul", x, share)


class PrimitiveVisionDialect(ClassicVisionDialect):
    """The classic dialect for TensorRT: 8.6 has no kernel for some LayerNormalizations."""

    def normalise(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        """By means in float32."""
        centred = bias is not None
        normal = self.normalise_root(x, weight, self.tower.norm_eps, center=centred)
        return normal if bias is None else self.graph.op("Add", normal, bias)

    def square(self, x: ir.Value) -> ir.Value:
        """By a product."""
        return self.graph.op("Mul", x, x)


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
