"""The peers run the very weights that Hearth runs."""

from pathlib import Path

import pytest
from msgspec import structs

from hearth.bench.contenders.contender import ContenderName, Job, open_contender
from hearth.bench.contenders.gguf_model import write_gguf
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model

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


def test_rows_of_a_batch_choose_what_one_row_does(quick_model: Path, tmp_path: Path) -> None:
    write_gguf(quick_model, tmp_path / "model.gguf", "F16")
    job = Job(contender="llama_cpp", path=str(tmp_path / "model.gguf"), prompt=PROMPT, steps=6)
    alone, rows = (open_contender(structs.replace(job, batch=batch)) for batch in (1, 3))
    assert alone.prefill() == rows.prefill()
    for _ in range(job.steps):
        assert alone.step() == rows.step()
    assert len(set(rows._last)) == 1  # type: ignore[attr-defined] # every row has the same prompt


def test_a_library_for_cpus_is_no_peer_on_a_gpu() -> None:
    with pytest.raises(HearthError, match="built for a CPU"):
        open_contender(Job(contender="llama_cpp", device="cuda"))
