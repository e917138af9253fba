import io
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hearth.runtime.config import Quantization
from hearth.runtime.engine_folder import DATA_FILE, EMBEDDING_FILE, MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.graph import INLINE_BYTES, GraphBuilder, Location
from hearth.runtime.export.layout import (
    EMBEDDING,
    HEAD,
    check_tensors,
    expected_tensors,
    settle_head,
)
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import resolve_dialect
from hearth.runtime.export.writer import (
    ALIGNMENT,
    DataFile,
    ProgressCounter,
    TensorPieces,
    write_safetensors,
)
from tests.references import NAMES, reference_folder
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import GraphDriver
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model

AT_LEAST_1_24 = resolve_dialect(ExportOptions()) == "native"
LAYERS = 3
PROJECTIONS = 4 * LAYERS + 1
# Nodes of one layer and of the rest, as written; a change here is a change of speed.
NODES = {"native": (24, 18), "classic": (52, 34)}


def optimized(folder: Path, target: Path) -> Counter[str]:
    """Operators of the graph that ONNX Runtime really runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # that a saved graph suits this machine alone
    options.optimized_model_filepath = str(target / "optimized.onnx")
    ort.InferenceSession(folder / MODEL_FILE, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in ir.load(target / "optimized.onnx").graph)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_valid_onnx(engine_folders: EngineFolders, name: str, dialect: str) -> None:
    onnx.checker.check_model(engine_folders(name, dialect) / MODEL_FILE, full_check=True)


@pytest.mark.parametrize(
    ("quantization", "opsets"),
    [("none", {"native": 24, "classic": 17}), ("int4", {"native": 24, "classic": 21})],
)
def test_the_opset_is_that_of_the_dialect(
    tmp_path: Path, dialect: Any, quantization: Quantization, opsets: dict[str, int]
) -> None:
    options = ExportOptions(dialect=dialect, quantization=quantization)
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    model = ir.load(tmp_path / "engine" / MODEL_FILE)
    assert model.opset_imports == {"": opsets[dialect]}


def test_the_number_of_nodes(engine_folders: EngineFolders, dialect: str) -> None:
    graph = ir.load(engine_folders("llama", dialect) / MODEL_FILE).graph
    in_layers, others = NODES[dialect]
    layered = sum(str(node.name).startswith("layers.") for node in graph)
    assert (layered, len(graph) - layered) == (in_layers * LAYERS, others)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_untied"])
def test_quantised_products_are_fused(
    tmp_path: Path, dialect: Any, quantization: Quantization, name: str
) -> None:
    if quantization == "int8" and not AT_LEAST_1_24:
        pytest.skip("ONNX Runtime 1.23 fuses int4 alone: int8 is right there, but slow")
    options = ExportOptions(dialect=dialect, quantization=quantization, block_size=16)
    export_model(reference_folder(name), tmp_path / "engine", options)
    counts = optimized(tmp_path / "engine", tmp_path)
    assert counts["MatMulNBits"] == PROJECTIONS
    assert counts["DequantizeLinear"] == 0


def test_classic_normalisation_and_key_transposes_are_fused(
    engine_folders: EngineFolders, tmp_path: Path
) -> None:
    counts = optimized(engine_folders("qwen3", "classic"), tmp_path)
    assert counts["SimplifiedLayerNormalization"] >= 3 * LAYERS + 1
    assert counts["FusedMatMul"] >= LAYERS


def test_a_tied_head_reads_the_embedding_table(engine_folders: EngineFolders, dialect: str) -> None:
    folder = engine_folders("qwen3", dialect)
    values = ir.load(folder / MODEL_FILE).graph.initializers.values()
    external = [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]
    assert {str(tensor.location) for tensor in external} == {DATA_FILE, EMBEDDING_FILE}
    assert all((tensor.offset or 0) % ALIGNMENT == 0 for tensor in external)
    assert (folder / DATA_FILE).stat().st_size < 4 * 50_000


def test_the_native_cache_is_written_in_place(
    engine_folders: EngineFolders, capfd: pytest.CaptureFixture[str]
) -> None:
    if not AT_LEAST_1_24:
        pytest.skip("this ONNX Runtime reads opset 23 at most")
    driver = GraphDriver(engine_folders("qwen3", "native"), 2, capacity=16)
    driver.step([[5, 6, 7], [8]])
    driver.step([[9], [10]])
    assert "in-place" not in capfd.readouterr().err
    for cache in driver.caches.values():
        assert cache[0, :, :4].all()
        assert not cache[0, :, 4:].any()
    driver.aliased = False
    driver.step([[11], [12]])
    assert "in-place" in capfd.readouterr().err


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


def test_tensors_begin_at_pages_and_follow_each_other() -> None:
    file, counted = io.BytesIO(), list[int]()
    data = DataFile(file, counted.append)
    assert data.append([np.zeros(10, np.uint8), np.ones(5, np.uint8)]) == (0, 15)
    assert data.append([np.full((2, 3), 7, np.float32)]) == (ALIGNMENT, 24)
    assert data.append(iter([])) == (2 * ALIGNMENT, 0)
    assert counted == [10, 5, 24]
    content = file.getvalue()
    assert content[:15] == bytes(10) + b"\1" * 5
    assert content[ALIGNMENT : ALIGNMENT + 24] == np.full(6, 7, np.float32).tobytes()


def test_a_piece_that_is_not_contiguous_is_written_in_its_order() -> None:
    file = io.BytesIO()
    DataFile(file, lambda _: None).append([np.arange(6, dtype=np.uint8).reshape(2, 3).T])
    assert file.getvalue() == bytes([0, 3, 1, 4, 2, 5])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_safetensors_file_reads_back(tmp_path: Path, dtype: type) -> None:
    table: NDArray[Any] = np.arange(12).reshape(4, 3).astype(dtype)
    row: NDArray[Any] = np.array([5], dtype)
    offsets = write_safetensors(
        tmp_path / "file",
        {
            "table": TensorPieces(table.dtype, (4, 3), iter([table[:3], table[3:]])),
            "row": TensorPieces(row.dtype, (1,), [row]),
        },
    )
    stored = load_file(tmp_path / "file")
    np.testing.assert_array_equal(stored["table"], table)
    np.testing.assert_array_equal(stored["row"], row)
    content = (tmp_path / "file").read_bytes()
    assert offsets["table"] % ALIGNMENT == 0
    assert content[offsets["row"] :] == row.tobytes()


def test_the_meter_begins_at_nothing_and_never_exceeds_the_total() -> None:
    heard: list[tuple[str, int, int]] = []
    counter = ProgressCounter(lambda *step: heard.append(step), "weights", 10)
    counter.add(4)
    counter.add(9)
    assert heard == [("weights", 0, 10), ("weights", 4, 10), ("weights", 10, 10)]


def test_pieces_are_counted_when_they_have_been_taken() -> None:
    heard: list[int] = []
    counter = ProgressCounter(lambda _stage, done, _total: heard.append(done), "weights", 100)
    pieces = counter.over([np.zeros(5, np.uint8), np.zeros(7, np.uint8)])
    next(pieces)
    assert heard == [0]
    next(pieces)
    assert heard == [0, 5]
    counter.finish()
    assert heard == [0, 5, 100]


def test_nobody_needs_to_listen() -> None:
    ProgressCounter(None, "weights", 1).finish()


NORM = "model.norm.weight"


def fault(folder: Path) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        check_tensors(Checkpoint(folder), load_model_config(folder))
    return caught.value.code, caught.value.field


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model_passes_and_nothing_of_it_is_left_over(name: str) -> None:
    model, checkpoint = (
        load_model_config(reference_folder(name)),
        Checkpoint(reference_folder(name)),
    )
    check_tensors(checkpoint, model)
    assert {tensor for tensor, _ in expected_tensors(model)} == set(checkpoint.names)


def test_a_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors[NORM] = tensors[NORM].astype(np.int8)

    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, narrow)
    assert fault(folder) == ("model_invalid", NORM)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", intermediate_size=65)
    assert fault(folder) == ("model_invalid", "model.layers.0.mlp.gate_proj.weight")


def test_layers_beyond_those_stored_are_refused_at_the_first(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m", num_hidden_layers=10**12)
    assert fault(folder) == ("model_invalid", "model.layers.3.input_layernorm.weight")


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight"]
)
def test_a_tensor_that_nothing_would_read_is_refused(tmp_path: Path, name: str) -> None:
    def add(tensors: Tensors) -> None:
        tensors[name] = np.zeros(4, np.float32)

    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, add)
    assert fault(folder) == ("model_unsupported", name)


def test_derived_tensors_and_the_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    folder = copy_model("qwen3", tmp_path / "m")
    change_tensors(folder, add)
    check_tensors(Checkpoint(folder), load_model_config(folder))


@pytest.mark.parametrize(("factor", "tied"), [(1, True), (-1, False)])
def test_a_head_beside_a_tied_table_is_a_copy_or_its_own(
    tmp_path: Path, factor: int, *, tied: bool
) -> None:
    folder = copy_model("llama_linear", tmp_path / "m")
    change_tensors(folder, lambda one: one.update({HEAD: one[EMBEDDING].astype("f4") * factor}))
    checkpoint = Checkpoint(folder)
    model = settle_head(checkpoint, load_model_config(folder))
    assert model.tied_head == tied
    check_tensors(checkpoint, model)


@pytest.mark.parametrize(
    "head", [np.zeros((4, 32), np.float32), np.zeros((288, 32), np.int8)], ids=str
)
def test_a_head_beside_a_tied_table_that_does_not_fit_is_named(tmp_path: Path, head: Any) -> None:
    folder = copy_model("llama_linear", tmp_path / "m")
    change_tensors(folder, lambda one: one.update({HEAD: head}))
    with pytest.raises(HearthError) as caught:
        settle_head(Checkpoint(folder), load_model_config(folder))
    assert (caught.value.code, caught.value.field) == ("model_invalid", HEAD)
