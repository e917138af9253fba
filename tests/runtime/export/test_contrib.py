"""ONNX Runtime's own operators: their graph, and its numbers where the CPU has the kernels.

Queries and keys are normed inside the attention only on CUDA: those models are compared there.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from msgspec import structs

from runtime.engine_folder import DATA_FILE, MODEL_FILE
from runtime.errors import HearthError
from runtime.export import ExportOptions, export_model
from runtime.export.contrib import resolve_operators
from runtime.export.engine_config import engine_config
from runtime.export.model_config import load_model_config
from runtime.export.options import check_options, resolve_dialect
from tests.references import reference_folder, reference_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows

# By name: on a machine whose ONNX Runtime reads opset 23 at most, `auto` means classic.
CUDA = ExportOptions(backend="onnxruntime", device="cuda", dtype="float16", dialect="native")
RUNS_NATIVE = pytest.mark.skipif(
    resolve_dialect(ExportOptions()) != "native", reason="this ONNX Runtime reads opset 23 at most"
)
LAYER = {
    "MatMul": 5,
    "GroupQueryAttention": 1,
    "SkipSimplifiedLayerNormalization": 2,
    "QuickGelu": 1,
    "Mul": 1,
}


def _contrib_folder(name: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine folder in float32, which CUDA would refuse and the CPU has kernels for."""
    monkeypatch.setattr(
        "runtime.export.export.engine_config",
        lambda *given: structs.replace(engine_config(*given), operators="contrib", device="cuda"),
    )
    export_model(reference_folder(name), target, ExportOptions(dialect="native"))
    return target


@RUNS_NATIVE
@pytest.mark.parametrize("name", ["llama", "llama3_scaled", "llama_linear"])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_logits_of_single_rows_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    folder = _contrib_folder(name, tmp_path / "engine", monkeypatch)
    for row in reference_logits(name):
        (logits,) = run_rows(GraphDriver(folder, 1, capacity=32), [row], chunk)
        np.testing.assert_allclose(logits, row.logits, atol=1e-4, rtol=0)


@RUNS_NATIVE
def test_logits_of_a_ragged_batch_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _contrib_folder("llama", tmp_path / "engine", monkeypatch)
    rows = reference_logits("llama")
    driver = GraphDriver(folder, len(rows), capacity=32)
    for cache in driver.caches.values():
        cache[:] = 1e4
    for row, logits in zip(rows, run_rows(driver, rows, chunk=1), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=1e-4, rtol=0)


def test_the_nodes_of_a_layer(tmp_path: Path) -> None:
    options = structs.replace(CUDA, operators="contrib")
    config = export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    assert (config.operators, config.device, config.dialect) == ("contrib", "cuda", "native")
    model = ir.load(tmp_path / "engine" / MODEL_FILE)
    assert model.opset_imports == {"": 24, "com.microsoft": 1}
    inner = Counter(n.op_type for n in model.graph if str(n.name).startswith("layers.1/"))
    last = config.num_decoder_layers - 1
    assert inner == Counter(LAYER) + Counter({"Add": 1} if last == 1 else {})
    (attention, *_) = (n for n in model.graph if n.op_type == "GroupQueryAttention")
    norms = [value.name for value in attention.inputs[-2:] if value]
    assert [str(name).rsplit(".")[-1] for name in norms] == ["q_norm", "k_norm"]


@pytest.mark.parametrize("operators", ["standard", "contrib"])
def test_no_range_is_left_to_the_host(tmp_path: Path, operators: str) -> None:
    options = structs.replace(CUDA, operators=operators)
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    assert [node.name for node in graph if node.op_type == "Range"] == []
    every = graph.initializers["every_slot"].const_value
    assert every is not None
    if isinstance(every, ir.ExternalTensor):
        assert every.location == DATA_FILE
    config = load_model_config(reference_folder("qwen3"))
    assert every.shape == [min(config.max_position_embeddings, 4096)]


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        (ExportOptions(), "llama", "standard"),
        (CUDA, "llama", "contrib"),
        (structs.replace(CUDA, dtype="bfloat16"), "llama", "contrib"),
        (structs.replace(CUDA, dtype="float32"), "llama", "standard"),
        (structs.replace(CUDA, operators="standard"), "llama", "standard"),
        (structs.replace(CUDA, dialect="classic"), "llama", "standard"),
        (CUDA, "qwen2", "standard"),
    ],
)
def test_auto_takes_them_where_they_serve(options: ExportOptions, name: str, expected: str) -> None:
    check_options(options)
    assert resolve_operators(options, load_model_config(reference_folder(name))) == expected


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        (structs.replace(CUDA, dtype="float32"), "llama", "not float32"),
        (CUDA, "qwen2", "multiple of 16"),
    ],
)
def test_asked_for_in_vain_they_are_refused(
    options: ExportOptions, name: str, message: str
) -> None:
    asked = structs.replace(options, operators="contrib")
    with pytest.raises(HearthError, match=message) as caught:
        resolve_operators(asked, load_model_config(reference_folder(name)))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "operators")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ExportOptions(operators="contrib"), "operators"),
        (structs.replace(CUDA, operators="contrib", dialect="classic"), "operators"),
        (structs.replace(CUDA, quantization="int8"), "quantization"),
        (ExportOptions(dtype="bfloat16"), "dtype"),
    ],
)
def test_options_that_no_target_has_are_refused(options: ExportOptions, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_options(options)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", field)
