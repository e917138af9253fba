"""Graphs that take adapters against the reference pass over weights with the adapter merged."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from hearth.runtime.config import Quantization, load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import Dialect, resolve_dialect
from hearth.runtime.export.reference_pass import RoundedWeights, reference_logits
from tests.low_rank_models import AdaptedWeights, Adapter, engine_inputs, merge, random_adapter
from tests.references import reference_folder
from tests.references import reference_logits as stored_rows
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import Array, GraphDriver, open_session, run_rows
from tests.runtime.export.image_rows import ROWS, logits_of
from tests.runtime.export.tensorrt.graphs import CAPACITY, export_graph
from tests.runtime.export.trees import export_with_draft
from tests.vision_models import write_vision_model

TOLERANCE = 1e-4
RANK = 16
Taking = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def taking(tmp_path_factory: pytest.TempPathFactory) -> Taking:
    """Gives the folder of an engine that takes adapters of a model in a dialect."""

    @cache
    def folder(name: str, dialect: str) -> Path:
        target = tmp_path_factory.mktemp("taking") / f"{name}-{dialect}"
        options = ExportOptions(dialect=_choice(dialect), max_lora_rank=RANK)
        export_model(reference_folder(name), target, options)
        return target

    return folder


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama_biased"])
def test_an_adapter_gives_what_merged_weights_give(
    taking: Taking, name: str, dialect: str, tmp_path: Path
) -> None:
    for rank in (8, RANK):
        adapter = random_adapter(reference_folder(name), rank)
        source = merge(reference_folder(name), tmp_path / str(rank), adapter)
        model = load_model_config(source)
        weights = RoundedWeights(Checkpoint(source), engine_config(model, ExportOptions()))
        given = _logits(taking(name, dialect), name, adapter)
        for row, logits in zip(stored_rows(name), given, strict=True):
            expected = reference_logits(model, weights, row.token_ids)
            assert np.abs(expected - row.logits).max() > 0.5  # It changes what comes out.
            np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # With biases, and with norms of heads.
def test_no_adapter_gives_the_bits_of_an_engine_without(
    taking: Taking, engine_folders: EngineFolders, name: str, dialect: str
) -> None:
    plain = _logits(engine_folders(name, dialect), name, {})
    full = random_adapter(reference_folder(name), RANK)
    zeros = {key: (0 * a, 0 * b) for key, (a, b) in full.items()}
    for adapter in (Adapter(), zeros):
        given = _logits(taking(name, dialect), name, adapter)
        for logits, expected in zip(given, plain, strict=True):
            assert np.array_equal(logits, expected)


def test_an_adapter_of_some_projections_and_layers(taking: Taking, dialect: str) -> None:
    adapter = random_adapter(reference_folder("qwen3"), 8, targets="q v down")
    del adapter[0, "down"]
    _compare(taking("qwen3", dialect), "qwen3", adapter)


def test_an_engine_takes_the_targets_that_were_asked_for(tmp_path: Path, dialect: str) -> None:
    asked = ("v", "q", "up", "gate")
    options = ExportOptions(dialect=_choice(dialect), max_lora_rank=8, lora_targets=asked)
    config = export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    assert config.lora_targets == ("qkv", "gate_up")
    adapter = random_adapter(reference_folder("qwen3"), 8, targets=" ".join(asked))
    _compare(tmp_path / "engine", "qwen3", adapter)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_keep_their_kernels(
    tmp_path: Path, dialect: str, quantization: Quantization
) -> None:
    options = ExportOptions(
        dialect=_choice(dialect),
        quantization=quantization,
        max_lora_rank=8,
    )
    config = export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    _compare(tmp_path / "engine", "qwen3", random_adapter(reference_folder("qwen3"), 8))
    if quantization == "int8" and resolve_dialect(ExportOptions()) != "native":
        pytest.skip("this ONNX Runtime has no kernel for eight bits")
    asked = ort.SessionOptions()
    asked.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(tmp_path / "engine" / MODEL_FILE, asked, ["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in ir.load(tmp_path / "optimised.onnx").graph)
    assert kinds["MatMulNBits"] == 4 * config.num_decoder_layers + 1


def test_adapters_have_the_type_of_the_engine(tmp_path: Path, dialect: str) -> None:
    options = ExportOptions(dialect=_choice(dialect), dtype="float16", max_lora_rank=8)
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    _compare(tmp_path / "engine", "qwen3", random_adapter(reference_folder("qwen3"), 8), 0.1)


def test_an_engine_of_trees_takes_adapters_and_its_draft_takes_none(
    tmp_path: Path, dialect: str
) -> None:
    folder = export_with_draft("qwen3", tmp_path, dialect=dialect, max_lora_rank=8)
    _compare(folder, "qwen3", random_adapter(reference_folder("qwen3"), 8))
    draft = load_config(folder / DRAFT_FOLDER)
    assert (draft.max_supported_lora_rank, draft.lora_targets) == (0, ())
    session = open_session(folder / DRAFT_FOLDER)
    assert not [one.name for one in session.get_inputs() if "lora" in one.name]


def test_graphs_of_plans_take_the_greatest_rank_alone(tmp_path: Path, dialect: str) -> None:
    folder = tmp_path / "engine"
    export_graph("qwen3", folder, _choice(dialect), "float32", max_lora_rank=8)
    assert load_config(folder).lora_targets == ("qkv", "o", "gate_up", "down")
    for targets in ("", "k gate"):
        adapter = random_adapter(reference_folder("qwen3"), 5, targets=targets)
        _compare(folder, "qwen3", adapter, 2e-4)


def test_models_that_take_images_take_adapters(
    tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.runtime.export.export.write_vision", lambda *_: None)
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    adapter = random_adapter(model, 8)
    options: dict[str, Any] = {"dialect": dialect, "max_lora_rank": 8}
    given = GraphDriver(export_with_draft(model, tmp_path / "taking", **options), ROWS, CAPACITY)
    given.adapter = engine_inputs(given.config, adapter)
    merged = merge(model, tmp_path / "merged_model", adapter)
    options["max_lora_rank"] = 0
    expected = GraphDriver(
        export_with_draft(merged, tmp_path / "merged", **options), ROWS, CAPACITY
    )
    pairs = zip(*(logits_of(one, "qwen3_vl", 5) for one in (given, expected)), strict=True)
    for logits, wanted in pairs:
        np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)


def _choice(dialect: str) -> Dialect:
    return "native" if dialect == "native" else "classic"


def _logits(folder: Path, name: str, adapter: Adapter) -> list[Array]:
    chosen = stored_rows(name)
    driver = GraphDriver(folder, len(chosen), CAPACITY)
    driver.adapter = engine_inputs(driver.config, adapter)
    return run_rows(driver, chosen, chunk=8)


def _compare(folder: Path, name: str, adapter: Adapter, tolerance: float = TOLERANCE) -> None:
    """Compare with the reference pass, which adds the adapter to each product."""
    model = load_model_config(reference_folder(name))
    checkpoint = Checkpoint(reference_folder(name))
    weights = AdaptedWeights(checkpoint, load_config(folder), adapter)
    given = _logits(folder, name, adapter)
    for row, logits in zip(stored_rows(name), given, strict=True):
        expected = reference_logits(model, weights, row.token_ids)
        np.testing.assert_allclose(logits, expected, atol=tolerance, rtol=0)
