"""The stored references against the installed transformers, and exports of fresh random models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.layout import EMBEDDING, HEAD
from tests.references import (
    NAMES,
    ReferenceRow,
    reference_folder,
    reference_logits,
    split_rows,
)
from tests.runtime.export.graph_driver import GraphDriver, run_rows
from tests.runtime.export.hugging_face import change_tensors, copy_model

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


@pytest.mark.parametrize("name", NAMES)
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
        {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_other_shapes_agree(
    torch: Any, tmp_path: Path, dialect: Any, kind: str, sizes: dict[str, int]
) -> None:
    family = pytest.importorskip("transformers")
    make = pytest.importorskip("tests.references.make")
    served = {"attention_bias"} if kind in ("Qwen2", "Mistral") else set[str]()
    given = {name: size for name, size in sizes.items() if name not in served}
    config = getattr(family, f"{kind}Config")(**{**make.SIZES, **given})
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


@pytest.mark.parametrize("factor", [1, -0.5])
def test_a_head_stored_beside_a_tied_table_agrees(
    torch: Any, loader: Any, tmp_path: Path, factor: float
) -> None:
    folder = copy_model("llama_linear", tmp_path / "m")
    change_tensors(folder, lambda one: one.update({HEAD: one[EMBEDDING] * np.float16(factor)}))
    ids = list(range(3, 20))
    expected = live_logits(torch, loader, folder, ids)
    export_model(folder, tmp_path / "engine", ExportOptions())
    driver = GraphDriver(tmp_path / "engine", 1, capacity=32)
    (logits,) = run_rows(driver, [ReferenceRow(ids, 9, expected)], chunk=8)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
