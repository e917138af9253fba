"""The stored references against the installed transformers, and exports of fresh random models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.export import ExportOptions, export_model
from tests.references import (
    NAMES,
    ReferenceRow,
    reference_folder,
    reference_logits,
    split_rows,
)
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.hugging_face import copy_model

pytestmark = pytest.mark.reference
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def loader() -> Any:
    return pytest.importorskip("transformers").AutoModelForCausalLM


def live_logits(torch: Any, loader: Any, folder: Path, ids: list[int]) -> Any:
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


# transformers itself has no partial rotation for this architecture.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama_partial"])
def test_stored_logits_are_those_of_transformers(torch: Any, loader: Any, name: str) -> None:
    row = reference_logits(name)[0]
    logits = live_logits(torch, loader, reference_folder(name), row.token_ids)
    np.testing.assert_allclose(logits, row.logits, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"num_attention_heads": 6, "head_dim": 10, "hidden_size": 36},
        {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_other_shapes_agree(
    torch: Any, tmp_path: Path, dialect: Any, kind: str, sizes: dict[str, int]
) -> None:
    family = pytest.importorskip("transformers")
    make = pytest.importorskip("tests.references.make")
    config = getattr(family, f"{kind}Config")(**{**make.SIZES, **sizes})
    recipe = make.Recipe(config, getattr(family, f"{kind}ForCausalLM"), 5, torch.float32)
    model = make.build(recipe, seed=1)
    make.write_model(tmp_path / "m", model, recipe, make.make_tokenizer())
    tensors, _ = make.run_rows(model, seed=1)
    rows = split_rows({name: value.numpy() for name, value in tensors.items()})
    export_model(tmp_path / "m", tmp_path / "engine", ExportOptions(dialect=dialect))
    driver = GraphDriver(tmp_path / "engine", len(rows), capacity=32)
    for row, logits in zip(rows, run_rows(driver, rows, 5), strict=True):
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("theta", [10_000.0, 5_000_000.0])
@pytest.mark.parametrize("name", ["qwen2", "llama3_scaled"])
def test_long_sequences_agree(
    torch: Any, loader: Any, tmp_path: Path, name: str, theta: float
) -> None:
    folder = copy_model(name, tmp_path / "m", rope_theta=theta)
    ids = np.random.default_rng(1).integers(0, 288, 500).tolist()
    expected = live_logits(torch, loader, folder, ids)
    export_model(folder, tmp_path / "engine", ExportOptions(prefill_chunk=64))
    driver = GraphDriver(tmp_path / "engine", 1, capacity=512)
    (logits,) = run_rows(driver, [ReferenceRow(ids, 480, expected)], chunk=64)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
