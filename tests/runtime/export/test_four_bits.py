"""Four bits on a GPU: the products of ONNX Runtime's CUDA provider, and what engines refuse."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from msgspec import structs

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import check_options
from hearth.runtime.export.reference_pass import reference_logits
from hearth.runtime.export.rounded_weights import RoundedWeights
from hearth.runtime.export.tensorrt.options import PlanOptions
from hearth.runtime.weights.weights_file import load_layout
from tests.references import reference_folder
from tests.references import reference_logits as stored_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows

CUDA = ExportOptions(backend="onnxruntime", device="cuda", dtype="float16", quantization="int4")
PLANNED = structs.replace(CUDA, backend="auto", device="cpu", plan=PlanOptions())


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine in float32, which the CPU has kernels for, be one for CUDA."""
    monkeypatch.setattr(
        "hearth.runtime.export.export.engine_config",
        lambda *given: structs.replace(engine_config(*given), device="cuda"),
    )


@pytest.mark.parametrize("head", ["body", "none"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_products_of_four_bits_are_those_of_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, head: str
) -> None:
    on_cuda(monkeypatch)
    folder = reference_folder(name)
    options = ExportOptions(quantization="int4", head_quantization=head)  # type: ignore[arg-type]
    config = export_model(folder, tmp_path / "engine", options)
    assert (config.device, config.weight_block_size) == ("cuda", 32)
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    # The graph of a layer has four products of which one is of q, k and v and one of gate and up.
    assert len(products) == 4 * config.num_decoder_layers + (head == "body")
    assert not [node for node in graph if node.op_type == "DequantizeLinear"]
    weights = RoundedWeights(Checkpoint(folder), config)
    rows = stored_logits(name)
    driver = GraphDriver(tmp_path / "engine", len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, chunk=8), strict=True):
        expected = reference_logits(load_model_config(folder), weights, row.token_ids)
        np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)
        assert np.abs(expected - row.logits).max() > 1e-3


def test_they_may_lie_beside_the_graph(tmp_path: Path) -> None:
    options = structs.replace(CUDA, external_weights=True)
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    layout, config = load_layout(tmp_path / "engine"), load_config(tmp_path / "engine")
    head, scale = layout.tensors["head"], layout.tensors["head_scale"]
    blocks = (config.vocab_size, config.hidden_size // 32)
    assert (layout.head, head.dtype, head.shape) == ("head", "U8", (*blocks, 16))
    assert (scale.dtype, scale.shape) == ("F16", blocks)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (structs.replace(CUDA, quantization="int8"), "quantization"),
        (structs.replace(CUDA, head_quantization="int8"), "quantization"),
        (structs.replace(CUDA, quantization="none", block_size=32), "block_size"),
        (structs.replace(PLANNED, quantization="int8"),
         "quantization"),
        (structs.replace(PLANNED, external_weights=True),
         "external_weights"),
    ],
)  # fmt: skip
def test_what_no_engine_of_a_gpu_takes_is_refused(options: ExportOptions, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_options(options)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", field)
