import time
from pathlib import Path
from typing import Any

import pytest

from hearth.bench.contenders.contender import Job, open_contender
from hearth.bench.random_model import QUICK_SHAPE, write_shape

pytestmark = pytest.mark.reference
torch = pytest.importorskip("torch")
torch_models = pytest.importorskip("hearth.bench.contenders.torch_models")

PROMPT = [5, 77, 200, 31]


def job(model: Path, **changes: object) -> Job:
    given: dict[str, object] = {
        "contender": "static_cache",
        "path": str(model),
        "prompt": PROMPT,
        "precision": "float32",
        "capacity": 64,
        "batch": 2,
        **changes,
    }
    return Job(**given)  # type: ignore[arg-type] # of a test


def reference(model: Path, steps: int) -> list[int]:
    found = open_contender(job(model, contender="transformers", batch=1))
    return [found.prefill(), *(found.step() for _ in range(steps))]


def test_the_static_cache_gives_the_tokens_of_the_growing_one(quick_model: Path) -> None:
    model = open_contender(job(quick_model))
    assert [model.prefill(), *(model.step() for _ in range(12))] == reference(quick_model, 12)


def test_after_compiling_it_begins_anew(quick_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def same(function: object, mode: str, fullgraph: bool) -> object:  # noqa: FBT001 - as called
        assert fullgraph
        compiled.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", same)
    model = open_contender(job(quick_model, contender="torch_compile"))
    tokens = [model.prefill(), *(model.step() for _ in range(12))]
    assert compiled == ["reduce-overhead"]
    assert tokens == reference(quick_model, 12)


class SlowModel:
    def __init__(self, seconds: float) -> None:
        self.steps = 0
        self._seconds = seconds

    def step(self) -> int:
        self.steps += 1
        time.sleep(self._seconds)
        return 0


@pytest.mark.parametrize(("best", "steps"), [(float("inf"), 4), (0.005, 4), (0.001, 1)])
def test_a_hopeless_precision_is_dropped_at_once(best: float, steps: int) -> None:
    model: Any = SlowModel(0.006)
    assert torch_models._trial(model, best) >= 0.006
    assert model.steps == steps


def test_transformers_finds_its_fastest_precision(
    quick_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(model: Any, best: float) -> float:
        assert best > 0
        return {"bfloat16": 1.0}.get(model.precision, 2.0)

    monkeypatch.setattr(torch_models, "_trial", trial)
    job = Job(contender="transformers", path=str(quick_model), prompt=PROMPT, steps=1)
    assert torch_models.fastest_precision(job) == "bfloat16"


def test_a_folder_without_weights_gives_random_ones(tmp_path: Path) -> None:
    write_shape(tmp_path / "shape", QUICK_SHAPE)
    model = open_contender(job(tmp_path / "shape", precision="bfloat16"))
    assert 0 <= model.prefill() < QUICK_SHAPE.vocabulary
    assert 0 <= model.step() < QUICK_SHAPE.vocabulary
