from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import Quantization
from hearth.runtime.engine_folder import MODEL_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model, weights
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.weights.quantised import Kind, round_weights, widen
from tests.references import reference_folder, reference_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model

PREFIX = "model.layers.1.self_attn"


def initializers(folder: Path) -> dict[str, NDArray[Any]]:
    values = ir.load(folder / MODEL_FILE).graph.initializers.values()
    return {str(v.name): v.const_value.numpy() for v in values if v.const_value is not None}


def source_matrix(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    return checkpoint.matrix(name, slice(None), slice(None)).astype(np.float32)


def test_projections_are_joined_side_by_side_and_transposed(tmp_path: Path) -> None:
    export_model(reference_folder("qwen3_untied"), tmp_path / "engine", ExportOptions())
    checkpoint = Checkpoint(reference_folder("qwen3_untied"))
    parts = [source_matrix(checkpoint, f"{PREFIX}.{kind}_proj.weight") for kind in "qkv"]
    stored = initializers(tmp_path / "engine")
    np.testing.assert_array_equal(stored["layers.1/qkv"], np.concatenate(parts).T)
    head = source_matrix(checkpoint, "lm_head.weight")
    np.testing.assert_array_equal(stored["head"], head.T)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_size_of_a_slab_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    block_size = 0 if quantization == "none" else 16
    options = ExportOptions(quantization=quantization, block_size=block_size)
    whole = export_model(reference_folder("qwen2"), tmp_path / "whole", options)
    monkeypatch.setattr(weights, "SLAB_BYTES", 5000)
    monkeypatch.setattr(weights, "TILE_BYTES", 500)
    pieces = export_model(reference_folder("qwen2"), tmp_path / "pieces", options)
    assert pieces.files == whole.files


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_logits_equal_those_of_the_weights_they_stand_for(
    tmp_path: Path, dialect: Any, quantization: Kind
) -> None:
    rounded = copy_model("llama", tmp_path / "rounded")
    change_tensors(rounded, lambda tensors: round_projections(tensors, quantization))
    options = ExportOptions(dialect=dialect)
    export_model(rounded, tmp_path / "float", options)
    options = ExportOptions(dialect=dialect, quantization=quantization, head_quantization="body")
    export_model(reference_folder("llama"), tmp_path / "quantised", options)
    rows = reference_logits("llama")
    exact, ours = (
        run_rows(GraphDriver(tmp_path / kind, len(rows), capacity=32), rows, chunk=8)
        for kind in ("float", "quantised")
    )
    for logits, expected in zip(ours, exact, strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def round_projections(tensors: Tensors, kind: Kind) -> None:
    wide = np.dtype(np.float32)
    for name, matrix in tensors.items():
        if "embed" in name:
            # Beside quantised weights the table has 16 bits.
            tensors[name] = matrix.astype(np.float16).astype(wide)
        elif matrix.ndim == 2:
            tensors[name] = widen(round_weights(matrix, kind, 32, wide), wide)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_head_of_a_tied_model_is_quantised_and_its_table_is_not(
    tmp_path: Path, quantization: Quantization
) -> None:
    export_model(
        reference_folder("qwen3"),
        tmp_path / "engine",
        ExportOptions(quantization=quantization, head_quantization="body"),
    )
    head = ir.load(tmp_path / "engine" / MODEL_FILE).graph.initializers["head"]
    assert head.dtype == ir.DataType[quantization.upper()]
    driver = GraphDriver(tmp_path / "engine", 1, capacity=8)
    original = source_matrix(Checkpoint(reference_folder("qwen3")), "model.embed_tokens.weight")
    np.testing.assert_array_equal(driver.table, original)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"],
)
def test_a_weight_that_is_not_finite_in_the_target_type_is_named(
    tmp_path: Path, name: str, value: float
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[-1] = value

    folder = copy_model("qwen3", tmp_path / "model")
    change_tensors(folder, spoil)
    with pytest.raises(HearthError) as caught:
        export_model(folder, tmp_path / "engine", ExportOptions(dtype="float16"))
    assert (caught.value.code, caught.value.field) == ("model_invalid", name)


def test_float32_weights_that_float16_cannot_hold_are_named(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    folder = copy_model("llama", tmp_path / "model")
    change_tensors(folder, lambda tensors: tensors[name].fill(1e5))
    with pytest.raises(HearthError) as caught:
        export_model(folder, tmp_path / "engine", ExportOptions(dtype="float16"))
    assert (caught.value.code, caught.value.field) == ("model_invalid", name)
