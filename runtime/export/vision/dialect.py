"""Operators that the two dialects of a vision encoder's graph write differently."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from hearth.runtime.export.dialect import Operators
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.vision.tower_model import Activation, TowerModel

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
