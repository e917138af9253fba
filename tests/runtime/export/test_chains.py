"""Engines of chains, which take no mask, beside those of trees."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER, MODEL_FILE
from tests.references import reference_logits
from tests.references.images import image_rows
from tests.runtime.export.graph_driver import GraphDriver
from tests.runtime.export.trees import TAPS, export_with_draft
from tests.vision_models import FAMILIES, write_vision_model

TOLERANCE = 1e-4


@pytest.fixture(params=["llama", "llama3_scaled", "llama_linear", "qwen3_vl", "qwen2_5_vl"])
def folders(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> tuple[list[list[int]], Path, Path]:
    """Prompts for a model, and its engines of chains and of trees."""
    model = request.param
    if model in FAMILIES:
        prompts = [row.token_ids.tolist() for row in image_rows(model)]
        model = write_vision_model(tmp_path / "model", model)
    else:
        prompts = [row.token_ids[: row.prompt_length] for row in reference_logits(model)]
    trees = export_with_draft(model, tmp_path / "trees", dialect=dialect)
    chains = export_with_draft(model, tmp_path / "chains", verify="chains", dialect=dialect)
    return prompts, chains, trees


def open_driver(folder: Path) -> GraphDriver:
    """One row, whose rotary tables are random where it has its own."""
    driver = GraphDriver(folder, 1, capacity=32)
    if driver.config.use_context_dependent_rope:
        turns = np.random.default_rng(2).uniform(0, 9, driver.rope["rope_cos"].shape)
        tables = {"rope_cos": np.cos(turns), "rope_sin": np.sin(turns)}
        driver.rope = {name: table.astype(np.float32) for name, table in tables.items()}
    return driver


@pytest.mark.parametrize("width", [1, 2, 7])
def test_logits_and_hidden_states_are_those_of_an_engine_of_trees(
    folders: tuple[list[list[int]], Path, Path], width: int
) -> None:
    prompts, *engines = folders
    ids = np.random.default_rng(width).integers(3, 90, (1, width))
    for prompt in prompts:
        answers = []
        for folder in engines:
            driver = open_driver(folder)
            driver.step([prompt])
            places = np.arange(width)[None]
            answers.append(driver.run(ids, driver.filled[:, None] + places, places))
        hidden = answers[0]["hidden_states"]
        assert hidden.shape == (1, width, len(TAPS) * driver.config.hidden_size)
        # The first tap is what enters the model, not its norm.
        np.testing.assert_array_equal(hidden[..., : driver.config.hidden_size], driver.table[ids])
        for output in ("logits", "hidden_states"):
            np.testing.assert_allclose(answers[0][output], answers[1][output], atol=TOLERANCE)


def test_drafts_agree(folders: tuple[list[list[int]], Path, Path]) -> None:
    """The newest entries of a row, then a proposal of one token more at a time."""
    _, *engines = folders
    random = np.random.default_rng(3)
    drivers = [open_driver(folder / DRAFT_FOLDER) for folder in engines]
    config = drivers[0].config
    for entries in (6, 1, 3):
        base = random.standard_normal((1, entries, config.base_hidden_dim))
        _agree(drivers, entries, entries - 1, base=base)
        for driver in drivers:
            driver.filled += entries
        for used in (1, 2, 4):
            own = random.standard_normal((1, 4, config.hidden_size))
            _agree(drivers, 4, used - 1, own=own)


def _agree(drivers: list[GraphDriver], width: int, selected: int, **given: np.ndarray) -> None:
    config = drivers[0].config
    shape = (1, width, 1)
    ids = np.random.default_rng(width + selected).integers(3, 90, (1, width))
    base = given.get("base", np.zeros(shape) + np.zeros(config.base_hidden_dim))
    own = given.get("own", np.zeros(shape) + np.zeros(config.hidden_size))
    answers = [
        driver.run(
            ids,
            driver.filled[:, None] + np.arange(width),
            np.array([[selected]]),
            hidden_states_input=base,
            hidden_states_from_draft=own,
        )
        for driver in drivers
    ]
    for output in ("logits", "hidden_states"):
        np.testing.assert_allclose(answers[0][output], answers[1][output], atol=TOLERANCE)


def test_both_engines_have_no_mask(folders: tuple[list[list[int]], Path, Path]) -> None:
    _, chains, _ = folders
    for part in (chains, chains / DRAFT_FOLDER):
        config = load_config(part)
        assert (config.chains_only, config.takes_tree_mask) == (True, False)
        graph = ir.load(part / MODEL_FILE).graph
        assert "tree_mask" not in [value.name for value in graph.inputs]
