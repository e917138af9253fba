"""A thin builder over onnx-ir: nodes by name of operator, weights streamed to a data file."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from hearth.runtime.export.writer import DataFile

Dimension = int | str
AttributeValue = int | float | str | Sequence[int]
# Small tensors stay in the graph itself, where ONNX Runtime can fold them.
INLINE_BYTES = 4096


class Location(NamedTuple):
    """Location of a tensor: a file beside the model, and offset and length in bytes."""

    file: str
    offset: int
    length: int


class Stored(NamedTuple):
    """Type, shape and place of a tensor of the data file."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    location: Location


Weights = Literal["stored", "outside", "bound"]
"""Place of a graph's weights: in or beside it, beside it alone, or in its inputs."""


class GraphBuilder:
    """Collect the nodes of one graph; values are named after the scope they were made in.

    `written` are the tensors of the data file. Of weights that are `outside` nothing is in the
    graph itself, and of those that are `bound` not even a reference: they are inputs.
    """

    def __init__(
        self, data: DataFile, data_file: str, opset: int, weights: Weights = "stored"
    ) -> None:
        self.opset = opset
        self.written: dict[str, Stored] = {}
        self._weights = weights
        self._data = data
        self._data_file = data_file
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self._domains: dict[str, int] = {}
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of everything made inside."""
        outer, self._scope = self._scope, f"{self._scope}{name}/"
        yield
        self._scope = outer

    def scoped(self, name: str) -> str:
        """The full name of something made here."""
        return f"{self._scope}{name}"

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Dimension]) -> ir.Value:
        """Declare a graph input; a dimension is a number or a symbol."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self._inputs.append(value)
        return value

    def output(
        self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[Dimension]
    ) -> None:
        """Make a value a graph output under a new name."""
        value.name = name
        value.shape = ir.Shape(shape)
        value.type = ir.TensorType(dtype)
        self._outputs.append(value)

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: AttributeValue) -> ir.Value:
        """Append a node with one output."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(
        self, kind: str, outputs: int, *inputs: ir.Value | None, **attributes: AttributeValue
    ) -> Sequence[ir.Value]:
        """Append a node with several outputs; "domain::kind" is of another domain."""
        domain, _, kind = kind.rpartition("::")
        if domain:
            self._domains[domain] = 1
        name = f"{self._scope}{kind}_{len(self._nodes)}"
        node = ir.Node(
            domain,
            kind,
            inputs,
            [_attribute(key, value) for key, value in attributes.items()],
            num_outputs=outputs,
            name=name,
        )
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}" if outputs > 1 else name
        self._nodes.append(node)
        return node.outputs

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """A small constant; equal ones are stored once."""
        name = f"const_{array.dtype}_{'x'.join(map(str, array.shape))}_{array.tobytes().hex()}"
        if name not in self._initializers:
            self._add(ir.Tensor(array, name=f"const_{len(self._initializers)}"), name)
        return self._initializers[name]

    def ints(self, *values: int) -> ir.Value:
        """A one-dimensional int64 constant, as shapes and axes are given."""
        return self.constant(np.array(values, np.int64))

    def weight(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], pieces: Iterable[NDArray[Any]]
    ) -> ir.Value:
        """A tensor whose pieces are produced, and written to the data file, one at a time."""
        return self.stored(name, dtype, shape, self.write(name, dtype, shape, pieces))

    def write(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], pieces: Iterable[NDArray[Any]]
    ) -> Location:
        """Write a tensor to the data file; the graph does not know of it yet."""
        location = Location(self._data_file, *self._data.append(pieces))
        self.written[name] = Stored(dtype, tuple(shape), location)
        return location

    def vector(self, name: str, array: NDArray[Any]) -> ir.Value:
        """A small weight: in the graph itself, or in the data file when it is not so small."""
        if self._weights != "stored" or array.nbytes > INLINE_BYTES:
            return self.weight(name, ir.DataType.from_numpy(array.dtype), array.shape, [array])
        return self._add(ir.Tensor(array, name=name), name)

    def table(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Numbers that follow from sizes alone, whatever the model's weights are."""
        if self._weights == "stored":
            return self.vector(name, array)
        return self._add(ir.Tensor(array, name=name), name)

    def stored(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], location: Location
    ) -> ir.Value:
        """A tensor that lies in a file beside the model."""
        if self._weights == "bound":
            return self.input(name, dtype, shape)
        tensor = ir.ExternalTensor(*location, dtype, shape=ir.Shape(shape), name=name)
        return self._add(tensor, name)

    def save(self, path: Path, ir_version: int, name: str = "decoder") -> None:
        """Write the graph; the data file must be complete."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": self.opset, **self._domains},
            name=name,
        )
        ir.save(ir.Model(graph, ir_version=ir_version, producer_name="hearth"), path)

    def _add(self, tensor: Any, key: str) -> ir.Value:
        value = ir.Value(
            name=tensor.name,
            shape=tensor.shape,
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._initializers[key] = value
        return value


def _attribute(name: str, value: AttributeValue) -> ir.Attr:
    if isinstance(value, bool | int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    return ir.AttrInt64s(name, value)
