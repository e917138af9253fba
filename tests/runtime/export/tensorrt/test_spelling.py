from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from hearth.runtime.engine_folder import MODEL_FILE
from tests.references import NAMES, reference_folder, reference_logits
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.image_rows import compare_images
from tests.runtime.export.tensorrt.graphs import (
    CAPACITY,
    CHUNK,
    PLAN,
    WIDE,
    export_graph,
    small_draft,
)
from tests.vision_models import FAMILIES, Family, write_vision_model

LAYERS = 3


@pytest.mark.parametrize("name", NAMES)
def test_the_primitive_graph_gives_the_reference_logits(tmp_path: Path, name: str) -> None:
    export_graph(name, tmp_path / "engine", "classic", "float32")
    rows = reference_logits(name)
    driver = GraphDriver(tmp_path / "engine", len(rows), CAPACITY)
    for row, logits in zip(rows, run_rows(driver, rows, CHUNK), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=2e-4)
        assert logits.argmax(-1).tolist() == row.logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_primitive_graphs_of_models_that_take_images_agree(
    tmp_path: Path, family: Family
) -> None:
    model, target = write_vision_model(tmp_path / "m", family), tmp_path / "engine"
    export_graph(model, target, "classic", "float32", small_draft(model, tmp_path))
    compare_images(target, family, CHUNK, 2e-4)
    compare_draft(target, model, 2e-4)
    onnx.checker.check_model(target / MODEL_FILE, full_check=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_primitive_graph_is_valid_onnx(tmp_path: Path, name: str) -> None:
    export_graph(name, tmp_path / "engine", "classic", "float16")
    onnx.checker.check_model(tmp_path / "engine" / MODEL_FILE, full_check=True)


def test_wide_caches_give_the_logits_of_narrow_ones(tmp_path: Path) -> None:
    rows = reference_logits("qwen3")
    logits = []
    for plan in (PLAN, WIDE):
        target = tmp_path / plan.kv_cache_dtype
        export_graph("qwen3", target, "classic", "float16", plan=plan)
        onnx.checker.check_model(target / MODEL_FILE, full_check=True)
        driver = GraphDriver(target, len(rows), CAPACITY)
        logits.append(run_rows(driver, rows, CHUNK))
    graph = ir.load(target / MODEL_FILE).graph
    for value in (*graph.inputs, *graph.outputs):
        if "_cache_" in str(value.name):
            assert value.dtype == ir.DataType.FLOAT
    # A row is rounded to half precision before it is kept wide, so nothing differs.
    for narrow, wide in zip(*logits, strict=True):
        np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("name", ["qwen3", "llama_biased"])
def test_the_primitive_graphs_of_speculation_take_trees(tmp_path: Path, name: str) -> None:
    target = tmp_path / "engine"
    export_graph(name, target, "classic", "float32", small_draft(name, tmp_path))
    rows = reference_logits(name)
    driver = GraphDriver(target, len(rows), CAPACITY)
    for row, logits in zip(rows, run_rows(driver, rows, CHUNK), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=2e-4)
    compare_draft(target, reference_folder(name), 2e-4)
    for folder in (target, target / "draft"):
        onnx.checker.check_model(folder / MODEL_FILE, full_check=True)


@pytest.mark.parametrize("dialect", ["classic", "native"])
def test_caches_and_rotary_tables_have_fixed_sizes(tmp_path: Path, dialect: str) -> None:
    export_graph("qwen3", tmp_path / "engine", "native" if dialect == "native" else "classic",
                 "bfloat16")  # fmt: skip
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    for value in graph.inputs:
        assert value.shape is not None
        if "cache" in str(value.name) and value.name != "kvcache_start_index":
            assert value.shape[2] == CAPACITY
        if str(value.name).startswith("rope"):
            assert value.shape[0] == CAPACITY


def test_queries_and_keys_are_normed_and_turned_together(tmp_path: Path) -> None:
    export_graph("qwen3", tmp_path / "engine", "classic", "float16")
    graph = ir.load(tmp_path / "engine" / MODEL_FILE).graph
    counts = Counter(node.op_type for node in graph)
    assert counts["Sqrt"] == 3 * LAYERS + 1
    assert counts["Softmax"] == LAYERS
    assert "Pow" not in counts
