"""The peers run the very weights that Hearth runs."""

from pathlib import Path

import pytest

from bench.contenders.contender import ContenderName, Job, open_contender
from bench.contenders.gguf_model import write_gguf
from runtime.export import ExportOptions, export_model

pytestmark = pytest.mark.reference
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

PROMPT = [5, 77, 200, 31, 90, 9, 150, 120]


def said(contender: ContenderName, path: Path, precision: str = "") -> list[int]:
    job = Job(
        contender=contender,
        path=str(path),
        threads=1,
        prompt=PROMPT,
        steps=24,
        precision=precision,
    )
    model = open_contender(job)
    return [model.prefill(), *(model.step() for _ in range(job.steps))]


def test_all_contenders_choose_the_same_tokens(quick_model: Path, tmp_path: Path) -> None:
    export_model(quick_model, tmp_path / "engine", ExportOptions(capacity=128, max_batch=1))
    write_gguf(quick_model, tmp_path / "model.gguf", "F32")
    hearth = said("hearth", tmp_path / "engine")
    assert len(set(hearth)) > 4
    assert said("transformers", quick_model, "float32") == hearth
    assert said("llama_cpp", tmp_path / "model.gguf") == hearth
