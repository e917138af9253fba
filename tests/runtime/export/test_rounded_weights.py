from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.export import export_model, rounded_weights
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.layout import EMBEDDING
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.rounded_weights import RoundedWeights
from tests.references import reference_folder
from tests.runtime.export.test_weights import initializers

OUTPUT = "model.layers.1.self_attn.o_proj.weight"
OPTIONS = [
    ExportOptions(),
    ExportOptions(dtype="float16"),
    ExportOptions(quantization="int8"),
    ExportOptions(quantization="int4", block_size=16),
    ExportOptions(dtype="float16", quantization="int8"),
]


def opened(options: ExportOptions) -> RoundedWeights:
    folder = reference_folder("llama")
    return RoundedWeights(Checkpoint(folder), engine_config(load_model_config(folder), options))


def held(stored: dict[str, NDArray[Any]], name: str) -> NDArray[np.float32]:
    """A projection [in, out] of an engine's graph, widened."""
    weights = stored[name].astype(np.float32)
    if f"{name}_scale" not in stored:
        return weights
    scales = stored[f"{name}_scale"].astype(np.float32)
    return weights * np.repeat(scales, len(weights) // len(scales), axis=0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tile", [1, 500, 1 << 20])
def test_projections_have_the_numbers_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: ExportOptions, tile: int
) -> None:
    monkeypatch.setattr(rounded_weights, "TILE_BYTES", tile)
    export_model(reference_folder("llama"), tmp_path / "engine", options)
    stored = initializers(tmp_path / "engine")
    eye = np.eye(64, dtype=np.float32)
    np.testing.assert_array_equal(
        opened(options).project(eye, OUTPUT), held(stored, "layers.1/output")
    )
    np.testing.assert_array_equal(
        opened(options).vector("model.norm.weight"), stored["model.norm"].astype(np.float32)
    )


def test_embedded_tokens_are_rows_of_the_table() -> None:
    whole = Checkpoint(reference_folder("llama")).matrix(EMBEDDING, slice(None), slice(None))
    embedded = opened(ExportOptions(dtype="float16")).embed(EMBEDDING, [[5, 287], [5, 0]])
    np.testing.assert_array_equal(embedded, whole[[[5, 287], [5, 0]]].astype(np.float16))
    assert embedded.dtype == np.float32


def test_inputs_of_products_round_as_their_types_do() -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 32)).astype(np.float32)
    half = opened(ExportOptions(dtype="float16")).rounded_inputs(x)
    np.testing.assert_array_equal(half, x.astype(np.float16).astype(np.float32))
    blocks = opened(ExportOptions(quantization="int4", block_size=16)).rounded_inputs(x)
    steps = np.abs(x).reshape(2, 3, 2, 16).max(axis=-1, keepdims=True) / 127
    assert blocks.shape == x.shape
    assert not np.array_equal(blocks, x)
    off = np.abs(blocks - x).reshape(2, 3, 2, 16)
    assert (off <= steps * 0.501).all()
    np.testing.assert_array_equal(opened(ExportOptions()).rounded_inputs(x), x)
