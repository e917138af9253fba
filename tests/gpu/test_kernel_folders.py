"""What kernels compute of small models: drafts, trees, taps, images' text and adapters."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hearth.runtime.config import load_config
from hearth.runtime.device.cuda.cuda_device import open_cuda_device
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.reference_pass import reference_logits as computed_logits
from tests.gpu.kernel_folder_driver import FolderDriver
from tests.low_rank_models import AdaptedWeights, Adapter, engine_inputs, random_adapter
from tests.references import reference_folder, reference_logits
from tests.runtime.export.drafts import compare_draft
from tests.runtime.export.graph_driver import Array, run_rows
from tests.runtime.export.image_rows import compare_images
from tests.runtime.export.trees import export_with_draft, random_trees
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NAMES = ("qwen3", "llama", "llama3_scaled", "llama_linear")
TOLERANCE = 0.05
RANK = 9
Folders = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    FolderDriver.device = open_cuda_device()
    yield
    for engine, *_ in FolderDriver.opened.values():
        engine.close()
    FolderDriver.opened.clear()
    FolderDriver.device.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A base with a draft, by the name of a reference model or of a family that sees."""

    @cache
    def folder(name: str) -> Path:
        target = tmp_path_factory.mktemp(name)
        options: dict[str, Any] = {"backend": "kernels", "device": "cuda", "dtype": "float16"}
        if name in FAMILIES:
            write_vision_model(target / "model", name)
            return export_with_draft(target / "model", target, verify="auto", **options)
        return export_with_draft(name, target, verify="auto", max_lora_rank=RANK, **options)

    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_agrees_with_its_reference(folders: Folders, name: str) -> None:
    compare_draft(folders(name), reference_folder(name), TOLERANCE, FolderDriver)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_of_a_model_that_sees_agrees(folders: Folders, family: Family) -> None:
    folder = folders(family)
    compare_draft(folder, folder.parent / "model", TOLERANCE, FolderDriver)


@pytest.mark.parametrize("chunk", [1, 5, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_and_without_an_image_agree(folders: Folders, family: Family, chunk: int) -> None:
    compare_images(folders(family), family, chunk, TOLERANCE, FolderDriver)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(folders: Folders, name: str) -> None:
    rows = reference_logits(name)
    driver = without_adapter(folders(name), len(rows))
    for row, logits in zip(rows, run_rows(driver, rows, chunk=5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [2, 9, 40])
def test_a_node_has_the_bits_of_its_path_alone(folders: Folders, name: str, nodes: int) -> None:
    driver = prefilled(folders(name), name)
    trees = random_trees(3, nodes, driver.config.vocab_size)
    every = np.tile(np.arange(nodes), (3, 1))
    outputs = driver.run(trees.ids, driver.filled[:, None] + trees.depths, every, trees.mask)
    for row in range(3):
        for node in range(0, nodes, 1 if nodes < 10 else 7):
            alone = prefilled(folders(name), name)
            alone.keep([row])
            path = [int(trees.ids[row, one]) for one in trees.path(row, node)]
            if node % 2:
                logits = [alone.step([[token]])[0][-1] for token in path][-1]
            else:
                logits = alone.step([path])[0][-1]
            assert np.array_equal(outputs["logits"][row, node], logits)
            hidden = alone.outputs["hidden_states"][0, -1]
            assert np.array_equal(outputs["hidden_states"][row, node], hidden)


@pytest.mark.parametrize("name", ["qwen3", "llama3_scaled"])
def test_hidden_states_are_the_inputs_of_layers(folders: Folders, name: str) -> None:
    driver = without_adapter(folders(name), 1)
    row = reference_logits(name)[0]
    logits = driver.step([row.token_ids])[0]
    taps = np.split(driver.outputs["hidden_states"][0], 3, -1)
    np.testing.assert_array_equal(taps[0], driver.table[row.token_ids])
    np.testing.assert_allclose(head_of(name, taps[2]), logits, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("targets", ["", "q v down", "o up"])
def test_adapters_add_what_the_reference_adds(folders: Folders, name: str, targets: str) -> None:
    folder = folders(name)
    adapter = random_adapter(reference_folder(name), RANK, targets=targets)
    model = load_model_config(reference_folder(name))
    weights = AdaptedWeights(Checkpoint(reference_folder(name)), load_config(folder), adapter)
    rows = reference_logits(name)
    found = {}
    for chunk in (8, 3):
        driver = FolderDriver(folder, len(rows), 64)
        driver.adapter = engine_inputs(driver.config, adapter)
        found[chunk] = run_rows(driver, rows, chunk=chunk)
    for row, logits, others in zip(rows, found[8], found[3], strict=True):
        expected = computed_logits(model, weights, row.token_ids)
        assert np.abs(expected - row.logits).max() > 2 * TOLERANCE
        np.testing.assert_allclose(logits, expected, atol=2 * TOLERANCE, rtol=0)
        assert np.array_equal(logits, others)


def test_no_adapter_gives_the_bits_of_one_of_zeros(folders: Folders) -> None:
    rows = reference_logits("qwen3")
    zeros = FolderDriver(folders("qwen3"), len(rows), 64)
    zeros.adapter = engine_inputs(zeros.config, Adapter())
    plain = without_adapter(folders("qwen3"), len(rows))
    for one, other in zip(run_rows(zeros, rows, 8), run_rows(plain, rows, 8), strict=True):
        assert np.array_equal(one, other)


def without_adapter(folder: Path, batch: int) -> FolderDriver:
    driver = FolderDriver(folder, batch, 64)
    driver.adapter = {
        name: one[:, :0] if "_a_" in name else one[:0]
        for name, one in engine_inputs(driver.config, {}).items()
    }
    return driver


def prefilled(folder: Path, name: str) -> FolderDriver:
    rows = reference_logits(name)
    driver = without_adapter(folder, len(rows))
    driver.step([row.token_ids[: row.prompt_length] for row in rows])
    return driver


def head_of(name: str, hidden: Array) -> Array:
    tensors = load_file(reference_folder(name) / "model.safetensors")
    weights = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    wide = hidden.astype(np.float32)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.asarray((normal * weights["model.norm.weight"]) @ head.T)
