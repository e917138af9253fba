from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from hearth.runtime.config import Quantization
from hearth.runtime.engine_folder import DATA_FILE, EMBEDDING_FILE, MODEL_FILE
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.options import resolve_dialect
from hearth.runtime.export.writer import ALIGNMENT
from tests.references import NAMES, reference_folder
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import GraphDriver

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
