from pathlib import Path

import pytest

from bench.contenders import load
from bench.worker_messages import Job

pytestmark = pytest.mark.reference
torch = pytest.importorskip("torch")
static_cache_model = pytest.importorskip("bench.static_cache_model")

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
    return Job(**given)  # type: ignore[arg-type]


def reference(model: Path, steps: int) -> list[int]:
    found = load(job(model, contender="transformers", batch=1))
    return [found.first, *(found.step() for _ in range(steps))]


def test_the_static_cache_gives_the_tokens_of_the_growing_one(quick_model: Path) -> None:
    model = load(job(quick_model))
    assert [model.first, *(model.step() for _ in range(12))] == reference(quick_model, 12)


def test_after_compiling_it_begins_anew(quick_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def same(function: object, mode: str, fullgraph: bool) -> object:  # noqa: FBT001 - as called
        assert fullgraph
        compiled.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", same)
    model = load(job(quick_model, contender="torch_compile"))
    assert compiled == ["reduce-overhead"]
    assert [model.first, *(model.step() for _ in range(12))] == reference(quick_model, 12)


def test_the_floor_reads_as_often_as_asked() -> None:
    floor = load(Job(contender="gpu_floor", bytes=1 << 20))
    assert (floor.first, floor.step(), floor.step(), floor.precision) == (0, 0, 0, "")
