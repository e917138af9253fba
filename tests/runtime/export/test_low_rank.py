"""Graphs that take adapters against the reference pass over weights with the adapter merged."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from runtime.export import ExportOptions, export_model
from runtime.export.checkpoint import Checkpoint
from runtime.export.engine_config import engine_config
from runtime.export.model_config import load_model_config
from runtime.export.reference_pass import reference_logits
from runtime.export.rounded_weights import RoundedWeights
from tests.low_rank_models import Adapter, engine_inputs, merge, random_adapter
from tests.references import ReferenceRow, reference_folder
from tests.references import reference_logits as stored_rows
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import Array, GraphDriver, run_rows

TOLERANCE = 1e-4
RANK = 16
NAMES = ("qwen2", "qwen3")  # One with biases, one with norms of queries and keys.


@pytest.fixture(scope="module")
def taking(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Gives the folder of an engine that takes adapters of a model in a dialect."""

    @cache
    def folder(name: str, dialect: str) -> Path:
        target = tmp_path_factory.mktemp("taking") / f"{name}-{dialect}"
        options = ExportOptions(
            dialect="native" if dialect == "native" else "classic", max_lora_rank=RANK
        )
        export_model(reference_folder(name), target, options)
        return target

    return folder


def _logits(folder: Path, name: str, adapter: Adapter) -> list[Array]:
    rows = stored_rows(name)
    driver = GraphDriver(folder, len(rows), capacity=32)
    driver.adapter = engine_inputs(driver.config, adapter)
    return run_rows(driver, rows, chunk=8)


def _merged(name: str, adapter: Adapter, folder: Path, row: ReferenceRow) -> Array:
    source = merge(reference_folder(name), folder / "merged", adapter)
    model = load_model_config(source)
    weights = RoundedWeights(Checkpoint(source), engine_config(model, ExportOptions()))
    return reference_logits(model, weights, row.token_ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [8, 16])
def test_an_adapter_gives_what_merged_weights_give(
    taking: Callable[[str, str], Path], name: str, dialect: str, rank: int, tmp_path: Path
) -> None:
    adapter = random_adapter(reference_folder(name), rank)
    row, given = stored_rows(name)[0], _logits(taking(name, dialect), name, adapter)[0]
    expected = _merged(name, adapter, tmp_path, row)
    assert np.abs(expected - row.logits).max() > 0.5  # It changes what comes out.
    np.testing.assert_allclose(given, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_no_adapter_gives_the_bits_of_an_engine_without(
    taking: Callable[[str, str], Path], engine_folders: EngineFolders, name: str, dialect: str
) -> None:
    plain = _logits(engine_folders(name, dialect), name, {})
    zeros = {key: (0 * a, 0 * b) for key, (a, b) in _full(name).items()}
    for adapter in ({}, zeros):
        for given, expected in zip(
            _logits(taking(name, dialect), name, adapter), plain, strict=True
        ):
            assert np.array_equal(given, expected)


def test_an_adapter_of_some_projections(taking: Callable[[str, str], Path], tmp_path: Path) -> None:
    adapter = random_adapter(reference_folder("qwen3"), 8, targets="q v down")
    del adapter[0, "down"]  # Layers may differ as well.
    row, given = stored_rows("qwen3")[0], _logits(taking("qwen3", "classic"), "qwen3", adapter)[0]
    expected = _merged("qwen3", adapter, tmp_path, row)
    np.testing.assert_allclose(given, expected, atol=TOLERANCE, rtol=0)


def _full(name: str) -> Adapter:
    return random_adapter(reference_folder(name), RANK)
