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

    def pairs(self, layer: int, targets: Sequence[str]) -> list[LoraInput]:
        """The pairs of inputs that these have."""
        found = (self._inputs.get((layer, target)) for target in targets)
        return list(dict.fromkeys(pair for pair in found if pair is not None))

    def add(self, layer: int, targets: Sequence[str], x: ir.Value, product: ir.Value) -> ir.Value:
        """`product` [B, S, N] of x and `targets` side by side, and of x and their low ranks.

        Without adapters that is `product` itself.
        """
        graph, parts = self._graph, []
        for pair in self.pairs(layer, targets):
            a = graph.input(pair.a, self._dtype, pair.shape_a)
            b = graph.input(pair.b, self._dtype, pair.shape_b)
            parts.append(graph.op("MatMul", graph.op("MatMul", x, a), b))
        if not parts:
            return product
        addend = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=-1)
        return graph.op("Add", product, addend)
