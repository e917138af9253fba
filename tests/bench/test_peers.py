"""The peers run the very weights that Hearth runs."""

from pathlib import Path

import pytest

from bench.contenders import load
from bench.gguf_model import write_gguf
from bench.worker_messages import Contender, Job
from runtime.export import ExportOptions, export_model

pytestmark = pytest.mark.reference
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

PROMPT = [5, 77, 200, 31, 90, 9, 150, 120]


def said(contender: Contender, path: Path, precision: str = "") -> list[int]:
    job = Job(
        contender=contender,
        path=str(path),
        threads=1,
        prompt=PROMPT,
        steps=24,
        precision=precision,
    )
    model = load(job)
    return [model.first, *(model.step() for _ in range(job.steps))]


def test_all_contenders_choose_the_same_tokens(quick_model: Path, tmp_path: Path) -> None:
    export_model(quick_model, tmp_path / "engine", ExportOptions(capacity=128, max_batch=1))
    write_gguf(quick_model, tmp_path / "model.gguf", "F32")
    hearth = said("hearth", tmp_path / "engine")
    assert len(set(hearth)) > 4
    assert said("transformers", quick_model, "float32") == hearth
    assert said("llama_cpp", tmp_path / "model.gguf") == hearth


def test_transformers_finds_its_fastest_precision(
    quick_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import transformers_model  # noqa: PLC0415 - needs the peer

    def trial(model: transformers_model.TransformersModel, best: float) -> float:
        assert best > 0
        return {"bfloat16": 1.0}.get(model.precision, 2.0)

    monkeypatch.setattr(transformers_model, "_trial", trial)
    job = Job(contender="transformers", path=str(quick_model), prompt=PROMPT, steps=1)
    assert transformers_model.fastest_precision(job) == "bfloat16"
