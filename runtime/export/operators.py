"""What every graph spells alike, in one element type."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from runtime.export.graph import GraphBuilder

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
        """What to add to scores: 0 where `visible`, `lowest` elsewhere."""
        return self.graph.op("Where", visible, self.number(0.0), self.number(self.lowest))

    @property
    def lowest(self) -> float:
        """What hides a score: half the smallest number, so that adding a score cannot overflow."""
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
