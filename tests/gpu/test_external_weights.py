"""Weights outside of an engine on a GPU: one engine, two models of its shape.

`HEARTH_TEST_WEIGHTS_PLAN` names an engine folder of the shipped model, whose plan binds its
weights.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.weights_export import export_weights
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from tests.gpu.conftest import CAPACITY, MODEL
from tests.gpu.near_ties import Reference, divergences, greedy_row, references
from tests.runtime.weights.external_models import tuned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PLAN = os.environ.get("HEARTH_TEST_WEIGHTS_PLAN")
NEAR_TIE = 0.1
ENGINES: dict[str, dict[str, Any]] = {
    "kernels-fp16": {"backend": "kernels", "dtype": "float16"},
    "fp32": {},
    "fp16": {"dtype": "float16"},
    "classic-fp16": {"dialect": "classic", "dtype": "float16"},
}


def spoken(engine: Path, weights: str = "") -> list[Reference]:
    """What an engine says, with its steps captured."""
    with closing(
        LLMInferenceRuntime.open(engine, RuntimeOptions(max_batch=2, weights=weights))
    ) as runtime:
        runtime.capture([1, 2])
        assert runtime.counters.failed_captures == 0, runtime.counters.failure
        rows = [greedy_row([5 + row, 60, 7, 80, 9], 30, ignore_eos=True) for row in range(2)]
        return references(runtime, rows)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The shipped model and another fine-tune of its shape."""
    return MODEL, tuned(MODEL, tmp_path_factory.mktemp("models") / "tuned")


@pytest.fixture(scope="module")
def wanted(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[Reference]]:
    """What both say on the CPU in float32."""
    folder = tmp_path_factory.mktemp("cpu")
    found = []
    for model in models:
        export_model(model, folder / model.name, ExportOptions(capacity=CAPACITY))
        found.append(spoken(folder / model.name))
    return found


@pytest.mark.parametrize("name", [*ENGINES, "tensorrt"])
def test_one_engine_serves_two_models(
    tmp_path: Path, models: tuple[Path, Path], wanted: list[list[Reference]], name: str
) -> None:
    engine = tmp_path / "engine"
    if name == "tensorrt":
        if not PLAN:
            pytest.skip("HEARTH_TEST_WEIGHTS_PLAN names no engine folder")
        engine = Path(PLAN)
    else:
        chosen: dict[str, Any] = {"backend": "onnxruntime", **ENGINES[name]}
        options = ExportOptions(device="cuda", capacity=CAPACITY, external_weights=True, **chosen)
        export_model(models[0], engine, options)
    other = tmp_path / "other.safetensors"
    export_weights(models[1], engine, other)
    for weights, reference in zip(("", str(other)), wanted, strict=True):
        given = [row.tokens for row in spoken(engine, weights)]
        parted = divergences(given, reference)
        print("divergences", weights, parted)  # noqa: T201 - reported with the figures of the run
        assert [one for one in parted if one.lead >= NEAR_TIE] == []
