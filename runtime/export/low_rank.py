"""Adapters in a graph (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models")."""

from collections.abc import Sequence

import onnx_ir as ir

from runtime.export.graph import GraphBuilder
from runtime.tensors.lora import LoraInput


class LowRank:
    """Adds to projections what the adapter gives that is bound; declares the inputs for it."""

    def __init__(
        self, graph: GraphBuilder, dtype: ir.DataType, inputs: Sequence[LoraInput]
    ) -> None:
        self._graph = graph
        self._dtype = dtype
        self._inputs = {(one.layer, target): one for one in inputs for target in one.targets}

    def add(self, layer: int, target: str, x: ir.Value, product: ir.Value) -> ir.Value:
        """`product` [B, S, N] of x and a projection, or several from it on, and of their low rank.

        Without a pair for it that is `product` itself.
        """
        pair = self._inputs.get((layer, target))
        if pair is None:
            return product
        a = self._graph.input(pair.a, self._dtype, pair.shape_a)
        b = self._graph.input(pair.b, self._dtype, pair.shape_b)
        low = self._graph.op("MatMul", self._graph.op("MatMul", x, a), b)
        return self._graph.op("Add", product, low)
