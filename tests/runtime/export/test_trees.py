"""Base engines that take token trees and give hidden states."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hearth.runtime.export import ExportOptions, export_model
from tests.references import NAMES, reference_folder, reference_logits
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model
from tests.runtime.export.trees import TAPS, Array, random_trees

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_mask_changes_nothing(
    tree_folders: EngineFolders, name: str, dialect: str
) -> None:
    rows = reference_logits(name)
    driver = GraphDriver(tree_folders(name, dialect), len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, chunk=5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_biased"])
@pytest.mark.parametrize("nodes", [2, 9])
def test_each_node_sees_its_path_alone(
    tree_folders: EngineFolders, name: str, dialect: str, nodes: int
) -> None:
    driver = _prefilled(tree_folders(name, dialect), name)
    trees = random_trees(3, nodes, driver.config.vocab_size)
    positions = driver.filled[:, None] + trees.depths
    every = np.tile(np.arange(nodes), (3, 1))
    outputs = driver.run(trees.ids, positions, every, trees.mask)
    for row in range(3):
        for node in range(nodes):
            alone = _prefilled(tree_folders(name, dialect), name)
            alone.keep([row])
            path = trees.path(row, node)
            logits = alone.step([[int(trees.ids[row, one]) for one in path]])[0]
            np.testing.assert_allclose(outputs["logits"][row, node], logits[-1], atol=TOLERANCE)
            np.testing.assert_allclose(
                outputs["hidden_states"][row, node],
                alone.outputs["hidden_states"][0, -1],
                atol=TOLERANCE,
            )


def test_a_tree_leaves_the_filled_slots_alone(tree_folders: EngineFolders, dialect: str) -> None:
    driver = _prefilled(tree_folders("llama", dialect), "llama")
    trees = random_trees(3, 6, driver.config.vocab_size)
    before = {name: cache.copy() for name, cache in driver.caches.items()}
    driver.run(trees.ids, driver.filled[:, None] + trees.depths, trees.depths, trees.mask)
    for name, cache in driver.caches.items():
        for row, filled in enumerate(driver.filled):
            np.testing.assert_array_equal(cache[row, :, :filled], before[name][row, :, :filled])


def test_nothing_behind_the_tree_is_seen(tree_folders: EngineFolders, dialect: str) -> None:
    drivers = [_prefilled(tree_folders("qwen3", dialect), "qwen3") for _ in range(2)]
    for cache in drivers[1].caches.values():
        for row, filled in enumerate(drivers[1].filled):
            cache[row, :, filled:] = 1e4
    trees = random_trees(3, 5, drivers[0].config.vocab_size)
    given = (trees.ids, drivers[0].filled[:, None] + trees.depths, trees.depths, trees.mask)
    plain, filthy = (driver.run(*given)["logits"] for driver in drivers)
    np.testing.assert_array_equal(plain, filthy)


@pytest.mark.parametrize("name", ["qwen3", "llama3_scaled"])
def test_hidden_states_are_the_inputs_of_the_tapped_layers(
    tree_folders: EngineFolders, name: str, dialect: str, tmp_path: Path
) -> None:
    driver = GraphDriver(tree_folders(name, dialect), 1, capacity=32)
    row = reference_logits(name)[0]
    logits = driver.step([row.token_ids])[0]
    taps = np.split(driver.outputs["hidden_states"][0], len(TAPS), -1)
    np.testing.assert_array_equal(taps[0], driver.table[row.token_ids].astype(np.float32))
    np.testing.assert_allclose(_head(name, taps[2]), logits, atol=TOLERANCE)
    cut = _without_layers_from(TAPS[1], name, tmp_path / "cut")
    export_model(cut, tmp_path / "engine", ExportOptions())
    shorter = GraphDriver(tmp_path / "engine", 1, capacity=32).step([row.token_ids])[0]
    np.testing.assert_allclose(_head(name, taps[1]), shorter, atol=TOLERANCE)


def _prefilled(folder: Path, name: str) -> GraphDriver:
    rows = reference_logits(name)
    driver = GraphDriver(folder, len(rows), capacity=32)
    driver.step([row.token_ids[: row.prompt_length] for row in rows])
    return driver


def _without_layers_from(first: int, name: str, target: Path) -> Path:
    def drop(tensors: Tensors) -> None:
        for tensor in list(tensors):
            layer = tensor.removeprefix("model.layers.").split(".")[0]
            if layer.isdigit() and int(layer) >= first:
                del tensors[tensor]

    folder = copy_model(name, target, num_hidden_layers=first)
    change_tensors(folder, drop)
    return folder


def _head(name: str, hidden: Array) -> Array:
    tensors = load_file(reference_folder(name) / "model.safetensors")
    weights = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    normal = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.asarray((normal * weights["model.norm.weight"]) @ head.T)
