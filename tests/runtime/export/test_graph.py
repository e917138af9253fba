import io
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from hearth.runtime.export.graph import INLINE_BYTES, GraphBuilder, Location
from hearth.runtime.export.writer import DataFile


@pytest.fixture
def data() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def graph(data: io.BytesIO) -> GraphBuilder:
    return GraphBuilder(DataFile(data, lambda _: None), "data", opset=17)


def save(graph: GraphBuilder, data: io.BytesIO, folder: Path) -> ort.InferenceSession:
    graph.save(folder / "model.onnx", ir_version=8)
    (folder / "data").write_bytes(data.getvalue())
    return ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def test_a_graph_runs(graph: GraphBuilder, data: io.BytesIO, tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = graph.input("x", ir.DataType.FLOAT, ("batch", 2))
    weight = graph.weight("w", ir.DataType.FLOAT, (2, 3), [matrix[:1], matrix[1:]])
    first, second = graph.ops("Split", 2, graph.op("MatMul", x, weight), graph.ints(1, 2), axis=1)
    joined = graph.op("Concat", second, first, axis=1)
    graph.output(joined, "y", ir.DataType.FLOAT, ("batch", 3))
    session = save(graph, data, tmp_path)
    given = np.array([[1, 2], [3, 4]], np.float32)
    (result,) = session.run(["y"], {"x": given})
    np.testing.assert_array_equal(result, (given @ matrix)[:, [1, 2, 0]])
    assert session.get_inputs()[0].shape == ["batch", 2]


def test_names_carry_their_scope(graph: GraphBuilder) -> None:
    x = graph.input("x", ir.DataType.FLOAT, (1,))
    with graph.scope("outer"):
        with graph.scope("inner"):
            assert graph.op("Neg", x).name == "outer/inner/Neg_0"
            assert graph.scoped("w") == "outer/inner/w"
        assert graph.op("Neg", x).name == "outer/Neg_1"
    assert graph.op("Neg", x).name == "Neg_2"


def test_equal_constants_are_stored_once(graph: GraphBuilder) -> None:
    assert graph.ints(1, 2) is graph.ints(1, 2)
    assert graph.ints(1, 2) is not graph.ints(2, 1)
    assert graph.ints(1) is not graph.constant(np.array(1))
    assert graph.ints(1) is not graph.constant(np.array([1], np.int32))


@pytest.mark.parametrize(
    ("bytes_", "kind"), [(INLINE_BYTES, ir.Tensor), (INLINE_BYTES + 4, ir.ExternalTensor)]
)
def test_small_vectors_stay_in_the_graph(graph: GraphBuilder, bytes_: int, kind: type) -> None:
    value = graph.vector("v", np.zeros(bytes_ // 4, np.float32))
    assert isinstance(value.const_value, kind)


def test_a_stored_tensor_points_into_its_file(graph: GraphBuilder) -> None:
    value = graph.stored("t", ir.DataType.FLOAT, (2, 3), Location("elsewhere", 4096, 24))
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert (str(tensor.location), tensor.offset, tensor.length) == ("elsewhere", 4096, 24)


def test_attributes_of_every_kind(graph: GraphBuilder, data: io.BytesIO, tmp_path: Path) -> None:
    x = graph.input("x", ir.DataType.FLOAT, (2, 3))
    y = graph.op("Transpose", x, perm=[1, 0])
    y = graph.op("LeakyRelu", y, alpha=0.5)
    y = graph.op("ReduceSum", y, graph.ints(0), keepdims=0)
    z = graph.input("z", ir.DataType.FLOAT, (2,))
    y = graph.op("Einsum", y, z, equation="i,i->i")
    graph.output(y, "y", ir.DataType.FLOAT, (2,))
    session = save(graph, data, tmp_path)
    feeds = {"x": np.array([[1, 2, 3], [-2, -4, -6]], np.float32), "z": np.ones(2, np.float32)}
    assert session.run(["y"], feeds)[0].tolist() == [6, -6]
