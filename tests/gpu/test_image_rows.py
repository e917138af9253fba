"""Text behind images on a GPU: small models of each family against the specification.

`HEARTH_TEST_IMAGE_PLANS` names a folder of engine folders by family, whose plans this machine runs.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.config import load_config
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from tests.eagle_models import write_draft
from tests.runtime.generation.image_models import STORE, arriving, check_text, image_rows
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TOLERANCE = 0.05
"""In log probability; half precision is the coarsest here."""
PLANS = os.environ.get("HEARTH_TEST_IMAGE_PLANS")
SIZES: dict[str, Any] = {
    "backend": "onnxruntime",
    "device": "cuda",
    "capacity": 256,
    "prefill_chunk": 16,
    "max_batch": 3,
}
ENGINES: dict[str, dict[str, Any]] = {
    "kernels-fp16": {"backend": "kernels", "dtype": "float16"},
    "fp32": {},
    "fp16": {"dtype": "float16"},
    "classic-fp16": {"dialect": "classic", "dtype": "float16"},
}


def check(models: tuple[Path, Path], family: Family, method: Any) -> None:
    """Rows that come together and one by one, with every step captured that can be."""
    rows = image_rows(family, load_config(models[1]).dtype)
    options = RuntimeOptions(speculation=SpeculationOptions(method=method, adaptive=False))
    runtime = LLMInferenceRuntime.open(models[1], options, embeddings=STORE)
    with closing(runtime):
        runtime.capture(range(1, runtime.max_batch + 1))
        assert runtime.counters.failed_captures == 0, runtime.counters.failure
        for apart in (0, 1, 4):
            for row, tokens in zip(rows, arriving(runtime, rows, apart), strict=True):
                assert len(tokens) == row.options.max_tokens
                check_text(models, row, tokens, tolerance=TOLERANCE)
        assert runtime.counters.hits > 0
        assert method == "off" or runtime.speculation_metrics.rounds > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_behind_images_is_that_of_the_specification(
    tmp_path: Path, family: Family, engine: str
) -> None:
    models = write_vision_model(tmp_path / "model", family), tmp_path / "engine"
    export_model(*models, ExportOptions(**{**SIZES, **ENGINES[engine]}))
    check(models, family, "off")


@pytest.mark.skipif(not PLANS, reason="no plans are named by HEARTH_TEST_IMAGE_PLANS")
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_say_what_the_specification_does(tmp_path: Path, family: Family) -> None:
    models = write_vision_model(tmp_path / "model", family), Path(PLANS or "") / family
    speculates = load_config(models[1]).enable_eagle_spec_decode
    check(models, family, "eagle" if speculates else "off")


@pytest.mark.parametrize(
    ("backend", "verify"),
    [("kernels", "auto"), ("onnxruntime", "trees"), ("onnxruntime", "chains")],
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_speculation_leaves_it_as_it_is(
    tmp_path: Path, family: Family, backend: Any, verify: Any
) -> None:
    models = write_vision_model(tmp_path / "model", family), tmp_path / "engine"
    draft = write_draft(models[0], tmp_path / "draft", form="offset", vocabulary=96)
    chosen = DraftOptions(folder=draft, eagle_layers=(0, 2, 3), verify=verify)
    options = {**SIZES, "backend": backend, "dtype": "float16", "draft": chosen}
    export_model(*models, ExportOptions(**options))
    check(models, family, "eagle")
