"""Token trees by ONNX Runtime's own operators, with the kernels of the CPU."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from runtime.config import load_config
from runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE
from runtime.export import ExportOptions
from runtime.export.options import resolve_dialect
from tests.references import NAMES, reference_folder, reference_logits
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.image_rows import compare_images
from tests.runtime.export.trees import export_with_draft, random_trees
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = pytest.mark.skipif(
    resolve_dialect(ExportOptions()) != "native", reason="this ONNX Runtime reads opset 23 at most"
)
TOLERANCE = 1e-4
LAYER = {
    "MatMul": 8,
    "FusedMatMul": 1,
    "SimplifiedLayerNormalization": 2,
    "RotaryEmbedding": 2,
    "ScatterND": 2,
    "Transpose": 2,
    "Reshape": 10,
    "Add": 1,
    "Softmax": 1,
    "SkipSimplifiedLayerNormalization": 2,
    "QuickGelu": 1,
    "Mul": 1,
}


@pytest.mark.parametrize("name", NAMES)
def test_logits_agree_in_a_ragged_batch(tmp_path: Path, name: str) -> None:
    rows = reference_logits(name)
    driver = GraphDriver(_folder(name, tmp_path), len(rows), capacity=32)
    for cache in driver.caches.values():
        cache[:] = 1e4
    for row, logits in zip(rows, run_rows(driver, rows, chunk=5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_trees_and_hidden_states_are_those_of_the_standard_operators(
    tmp_path: Path, name: str
) -> None:
    rows, answers = reference_logits(name), []
    for folder in (
        _folder(name, tmp_path / "contrib"),
        export_with_draft(name, tmp_path / "standard"),
    ):
        driver = GraphDriver(folder, len(rows), capacity=32)
        driver.step([row.token_ids[: row.prompt_length] for row in rows])
        trees = random_trees(len(rows), 9, driver.config.vocab_size)
        every = np.tile(np.arange(9), (len(rows), 1))
        positions = driver.filled[:, None] + trees.depths
        answers.append(driver.run(trees.ids, positions, every, trees.mask))
    for output in ("logits", "hidden_states"):
        np.testing.assert_allclose(answers[0][output], answers[1][output], atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_agree(tmp_path: Path, name: str) -> None:
    compare_draft(_folder(name, tmp_path), reference_folder(name), TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_take_images_agree(tmp_path: Path, family: Family) -> None:
    model = write_vision_model(tmp_path / "m", family)
    folder = _folder(model, tmp_path)
    compare_images(folder, family, 5, TOLERANCE)
    compare_draft(folder, model, TOLERANCE)


def test_the_nodes_of_a_layer(tmp_path: Path) -> None:
    graph = ir.load(_folder("qwen3", tmp_path) / MODEL_FILE).graph
    inner = Counter(n.op_type for n in graph if str(n.name).startswith("layers.1/"))
    assert inner == Counter(LAYER)


@pytest.mark.parametrize("part", [".", DRAFT_FOLDER])
def test_nothing_is_parted_unequally_or_ranged(tmp_path: Path, part: str) -> None:
    folder = _folder("qwen2", tmp_path)
    config = load_config(folder / part)
    assert (config.dialect, config.operators, config.device) == ("native", "contrib", "cuda")
    kinds = {node.op_type for node in ir.load(folder / part / MODEL_FILE).graph}
    assert not kinds & {"Range", "Split", "Pad", "TensorScatter", "Attention"}


def _folder(model: str | Path, target: Path) -> Path:
    """In float32, as the CPU has kernels for all of it."""
    return export_with_draft(
        model, target, backend="onnxruntime", device="cuda", operators="contrib"
    )
