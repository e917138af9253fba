import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench import gpu_decode_command
from bench.commands import bench
from bench.gpu_cases import ENGINES, GPU_CASES, LARGEST_BATCH, GPUCase
from bench.gpu_decode import GPUArtifacts, GPUPlan
from bench.gpu_decode_command import GPUChoice, gpu_choice, run_gpu
from bench.gpu_figures import GPUFigures, gpu_figures
from runtime.errors import HearthError
from tests.bench.test_gpu_figures import times

NOTHING: dict[str, Any] = {"ready": (), "engines": (), "dtype": None, "builder_python": None}


def refuse(*_: object) -> Path:
    raise HearthError("unsupported_option", "no builder here", "plan")


def some_figures(
    case: GPUCase, artifacts: GPUArtifacts, plan: GPUPlan, *_: object
) -> dict[str, GPUFigures]:
    found = gpu_figures(
        "ort-cuda", times(), batch=case.batch, step_bytes=1, dtype=plan.dtype, notes=[]
    )
    return dict.fromkeys(artifacts.engines, found)


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_decode_command, "random_source", lambda *_, **__: tmp_path)
    monkeypatch.setattr(gpu_decode_command, "engine_folder", refuse)
    monkeypatch.setattr(gpu_decode_command, "measure_gpu", some_figures)
    return tmp_path


def test_everything_is_measured_unless_something_is_chosen() -> None:
    choice = gpu_choice([], NOTHING, quick=False)
    assert choice.cases == list(GPU_CASES.values())
    assert (choice.engines, choice.dtype) == (ENGINES, "float16")
    assert choice.builder_python == sys.executable
    chosen = {**NOTHING, "engines": ("tensorrt",), "dtype": "bfloat16"}
    choice = gpu_choice([GPU_CASES["4b/b1"]], chosen, quick=True)
    assert (choice.engines, choice.plan.dtype, choice.plan.rounds) == (("tensorrt",), "bfloat16", 2)


@pytest.mark.parametrize("text", ["tensorrt/0.6b", "other/0.6b=x", "tensorrt/0.6b="])
def test_a_folder_needs_engine_and_model(text: str) -> None:
    with pytest.raises(click.BadParameter, match="ENGINE/MODEL=DIR"):
        gpu_choice([], {**NOTHING, "ready": (text,)}, quick=False)


def test_an_engine_that_cannot_be_made_has_no_key_but_a_reason(
    faked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = GPUChoice(cases=[GPU_CASES["0.6b/b1"]], ready={"ort-cuda/0.6b": faked})
    assert list(run_gpu(choice, faked, lambda _: None)) == ["ort-cuda/0.6b/b1"]
    assert "tensorrt/0.6b is left out: no builder here" in capsys.readouterr().err


def test_a_run_that_is_cut_short_has_kept_the_cases_before(
    faked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_at_batch_8(case: GPUCase, *rest: Any) -> dict[str, GPUFigures]:
        if case.batch == LARGEST_BATCH:
            raise KeyboardInterrupt
        return some_figures(case, *rest)

    monkeypatch.setattr(gpu_decode_command, "measure_gpu", end_at_batch_8)
    cases = [GPU_CASES["0.6b/b1"], GPU_CASES["0.6b/b8"]]
    choice = GPUChoice(cases=cases, ready={"ort-cuda/0.6b": faked})
    kept: list[list[str]] = []
    with pytest.raises(KeyboardInterrupt):
        run_gpu(choice, faked, lambda figures: kept.append(list(figures)))
    assert kept == [["ort-cuda/0.6b/b1"]]


def test_the_command_prints_and_records_keys_of_engine_and_case(
    faked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    kept = faked / "figures" / "h200.json"
    arguments = ["decode", "--device", "cuda", "--case", "4b/b1", "--case", "4b/b8", "--json"]
    arguments += ["--ready", f"ort-cuda/4b={faked}", "--cache", str(faked), "--record", str(kept)]
    result = CliRunner().invoke(bench, arguments, standalone_mode=False)
    assert result.exception is None
    figures = json.loads(result.stdout.splitlines()[-1])
    assert list(figures) == ["ort-cuda/4b/b1", "ort-cuda/4b/b8"]
    assert figures["ort-cuda/4b/b8"]["tokens_vs_batch_1"] == 8
    assert json.loads(kept.read_text())["figures"] == figures


def test_the_table_has_a_row_a_key(faked: Path) -> None:
    arguments = ["decode", "--device", "cuda", "--case", "0.6b/b1", "--cache", str(faked)]
    arguments += ["--ready", f"tensorrt/0.6b={faked}", "--engine", "tensorrt"]
    result = CliRunner().invoke(bench, arguments, standalone_mode=False)
    assert result.stdout.splitlines()[-1].split()[:3] == ["tensorrt/0.6b/b1", "2.000", "50"]


def test_without_any_engine_the_command_fails(faked: Path) -> None:
    arguments = ["decode", "--device", "cuda", "--cache", str(faked), "--json"]
    result = CliRunner().invoke(bench, arguments, standalone_mode=False)
    assert result.return_value == 1
    assert json.loads(result.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "4b/b1"], "no case on cpu"),
        (["--device", "cuda", "--case", "0.6b/fp32"], "no case on cuda"),
        (["--device", "cuda", "--threads", "2"], "for the CPU alone"),
        (["--engine", "tensorrt"], "are for a GPU"),
    ],
)
def test_what_is_for_another_device_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(bench, ["decode", *arguments], standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)
    assert words in result.exception.format_message()
