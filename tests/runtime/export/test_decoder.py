"""The exported graphs against stored float32 logits of transformers."""

from pathlib import Path

import numpy as np
import pytest

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.options import Dialect
from tests.references import NAMES, reference_folder, reference_logits
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import GraphDriver, run_rows

TOLERANCE = 1e-4
HALF_TOLERANCE = 0.1  # logits have a standard deviation of 1.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [4, 16])
def test_logits_agree_in_a_ragged_batch(
    engine_folders: EngineFolders, name: str, dialect: str, chunk: int
) -> None:
    rows = reference_logits(name)
    driver = GraphDriver(engine_folders(name, dialect), len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, chunk), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "llama3_scaled"])
def test_float16_logits_are_close(name: str, dialect: str, tmp_path: Path) -> None:
    options = ExportOptions(dialect=_choice(dialect), dtype="float16")
    export_model(reference_folder(name), tmp_path / "engine", options)
    rows = reference_logits(name)
    driver = GraphDriver(tmp_path / "engine", len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, 8), strict=True):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, row.logits, atol=HALF_TOLERANCE, rtol=0)


def test_only_the_selected_tokens_get_logits(engine_folders: EngineFolders, dialect: str) -> None:
    row = reference_logits("qwen3")[0]
    driver = GraphDriver(engine_folders("qwen3", dialect), 1, capacity=32)
    logits = driver.logits([row.token_ids[:8]], np.array([[7, 2]]))
    assert logits.shape == (1, 2, driver.config.vocab_size)
    np.testing.assert_allclose(logits[0], row.logits[[7, 2]], atol=TOLERANCE, rtol=0)


def test_what_lies_in_unfilled_slots_does_not_matter(
    engine_folders: EngineFolders, dialect: str
) -> None:
    rows = reference_logits("llama")
    driver = GraphDriver(engine_folders("llama", dialect), len(rows), capacity=40)
    for cache in driver.caches.values():
        cache[:] = 1e4
    for row, logits in zip(rows, run_rows(driver, rows, 5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("slots", [25, 32, 100])
def test_the_capacity_that_is_bound_does_not_matter(
    engine_folders: EngineFolders, dialect: str, slots: int
) -> None:
    row = reference_logits("qwen2")[0]
    driver = GraphDriver(engine_folders("qwen2", dialect), 1, capacity=slots)
    (logits,) = run_rows(driver, [row], chunk=13)
    np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


def _choice(dialect: str) -> Dialect:
    return "native" if dialect == "native" else "classic"
