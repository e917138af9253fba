import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hearth.bench.__main__ import bench
from hearth.bench.decode import cases, command
from hearth.bench.decode.cases import ENGINES, GPU_CASES, LARGEST_BATCH, PEERS, GPUCase
from hearth.bench.decode.command import gpu_plan, run_gpu
from hearth.bench.decode.cpu import SHARE_LIMIT
from hearth.bench.decode.gpu import GPUModels, GPUPlan
from hearth.bench.decode.gpu_figures import GPUFigures, gpu_figures
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from tests.bench.decode.test_gpu_figures import times
from tests.bench.running import hide

LIBRARIES = ("torch", "transformers", "llama_cpp", "gguf")


def decode(tmp_path: Path, *flags: str) -> tuple[int, dict[str, dict[str, object]], str]:
    arguments = ["decode", "--quick", "--threads", "1", "--cache", str(tmp_path / "cache"), *flags]
    result = CliRunner().invoke(bench, [*arguments, "--json"], standalone_mode=False)
    assert result.exception is None
    return result.return_value, json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_missing_peers_are_null_and_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in LIBRARIES:
        hide(tmp_path, peer, monkeypatch)
        monkeypatch.setitem(sys.modules, peer, None)
    code, figures, said = decode(tmp_path, "--case", "0.6b/fp32")
    case = figures["0.6b/fp32"]
    assert code == 0
    assert case["vs_transformers"] is case["vs_llama_cpp"] is None
    assert case["notes"] == [
        "transformers is left out: torch is not installed: make bench-env, or pip install torch",
        "llama_cpp is left out: gguf is not installed: make bench-env, or pip install gguf",
    ]
    assert said.splitlines()[0] == (
        "measured without some peers: torch, transformers, llama-cpp-python, gguf are not "
        "installed: make bench-env, or pip install torch transformers llama-cpp-python gguf"
    )
    assert isinstance(case["tokens_per_s"], float)
    assert isinstance(case["floor_share"], float)
    assert 0 < case["floor_share"] < SHARE_LIMIT


@pytest.mark.reference
def test_all_contenders_are_measured_together(tmp_path: Path) -> None:
    for peer in LIBRARIES:
        pytest.importorskip(peer)
    code, figures, progress = decode(tmp_path, "--case", "0.6b/fp32")
    case = figures["0.6b/fp32"]
    assert code == 0
    assert isinstance(case["vs_transformers"], float)
    assert isinstance(case["vs_llama_cpp"], float)
    assert case["same_tokens"] == {"transformers": case["tokens"], "llama_cpp": case["tokens"]}
    assert "round 2 of 2" in progress


NOTHING: dict[str, Any] = {
    "ready": (),
    "engines": (),
    "peers": (),
    "daemons": (),
    "dtype": None,
    "builder_python": None,
}


def refuse(*_: object, **__: object) -> Path:
    raise HearthError("unsupported_option", "no builder here", "plan")


def some_figures(
    case: GPUCase, models: GPUModels, plan: GPUPlan, *__: object
) -> dict[str, GPUFigures]:
    found = gpu_figures("ort-cuda", times(), case=case, step_bytes=1, dtype=plan.dtype, notes=[])
    return dict.fromkeys(map(str, models.folders), found)


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "gpu_facts", lambda: None)
    monkeypatch.setattr(command, "serving_library", lambda _: "a library")
    monkeypatch.setattr(command, "shape_source", lambda *_, **__: tmp_path)
    monkeypatch.setattr(command, "gpu_engine", refuse)
    monkeypatch.setattr(command, "pooled_gguf", lambda *_, **__: None)
    monkeypatch.setattr(command, "measure_gpu", some_figures)
    return tmp_path


def test_everything_is_measured_unless_something_is_chosen() -> None:
    plan = gpu_plan(NOTHING, quick=False)
    assert (plan.engines, plan.dtype, plan.rounds) == (ENGINES, "float16", 7)
    assert (plan.peers, plan.daemons) == (PEERS, ENGINES)
    assert plan.builder_python == sys.executable
    chosen = {**NOTHING, "engines": ("tensorrt",), "dtype": "bfloat16"}
    plan = gpu_plan({**chosen, "peers": ("llama_cpp",), "daemons": ("none",)}, quick=True)
    assert (plan.peers, plan.daemons) == (("llama_cpp",), ())
    assert (plan.engines, plan.dtype, plan.rounds) == (("tensorrt",), "bfloat16", 2)


@pytest.mark.parametrize("text", ["tensorrt/0.6b", "other/0.6b=x", "tensorrt/0.6b="])
def test_a_folder_needs_engine_and_model(text: str) -> None:
    with pytest.raises(click.BadParameter, match="ENGINE/MODEL=DIR"):
        gpu_plan({**NOTHING, "ready": (text,)}, quick=False)


def test_a_folder_that_is_said_to_be_ready_is_there(tmp_path: Path) -> None:
    ready = (f"tensorrt/4b={tmp_path}/nothing",)
    with pytest.raises(click.BadParameter, match="there is no folder"):
        gpu_plan({**NOTHING, "ready": ready}, quick=False)


def test_an_engine_that_cannot_be_made_has_no_key_but_a_reason(
    faked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = GPUPlan(ready={"ort-cuda/0.6b": faked})
    found = run_gpu([GPU_CASES["0.6b/b1"]], plan, faked, lambda _: None)
    assert list(found) == ["ort-cuda/0.6b/b1"]
    assert "tensorrt/0.6b is left out: no builder here" in capsys.readouterr().err


def test_a_run_that_is_cut_short_has_kept_the_cases_before(
    faked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_at_batch_8(case: GPUCase, *rest: Any) -> dict[str, GPUFigures]:
        if case.batch == LARGEST_BATCH:
            raise KeyboardInterrupt
        return some_figures(case, *rest)

    monkeypatch.setattr(command, "measure_gpu", end_at_batch_8)
    both = [GPU_CASES["0.6b/b1"], GPU_CASES["0.6b/b8"]]
    plan = GPUPlan(ready={"ort-cuda/0.6b": faked})
    kept: list[list[str]] = []
    with pytest.raises(KeyboardInterrupt):
        run_gpu(both, plan, faked, lambda figures: kept.append(list(figures)))
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
    assert result.stdout.splitlines()[-1].split()[:3] == ["tensorrt/0.6b/b1", "2", "50"]


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
        (["--daemon", "none"], "are for a GPU"),
    ],
)
def test_what_is_for_another_device_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(bench, ["decode", *arguments], standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)
    assert words in result.exception.format_message()


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made is in the list that it gives."""
    made: list[str] = []

    def no_gpu() -> None:
        raise HearthError("engine_incompatible", "there is no GPU", "device")

    monkeypatch.setattr(command, "gpu_facts", no_gpu)
    monkeypatch.setattr(command, "shape_source", lambda model, *_, **__: made.append(model))
    return made


def test_without_a_gpu_no_model_is_made(without_a_gpu: list[str], tmp_path: Path) -> None:
    arguments = ["decode", "--device", "cuda", "--cache", str(tmp_path / "cache")]
    result = CliRunner().invoke(bench, arguments, standalone_mode=False)
    assert isinstance(result.exception, HearthError)
    assert result.exception.code == "engine_incompatible"
    assert without_a_gpu == []
    assert not (tmp_path / "cache").exists()


def test_without_a_library_that_serves_an_engine_no_model_is_made(
    faked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(config: LLMEngineRunnerConfig) -> str:
        raise HearthError("engine_incompatible", f"{config.backend} is absent", "device")

    monkeypatch.setattr(command, "serving_library", absent)
    monkeypatch.setattr(command, "shape_source", None)
    assert run_gpu(list(GPU_CASES.values()), GPUPlan(), faked, lambda _: None) == {}
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        "kernels is left out: kernels is absent",
        "kernels-int8 is left out: kernels is absent",
        "kernels-int4 is left out: kernels is absent",
        "ort-cuda is left out: onnxruntime is absent",
        "tensorrt is left out: tensorrt is absent",
    ]


def test_a_model_that_is_absent_is_told_before_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "SOURCE", tmp_path / "home")
    cache = tmp_path / "cache"
    words = ["decode", "--case", "0.6b/fp32", "--case", "tiny/fp32", "--cache", str(cache)]
    result = CliRunner().invoke(bench, words, standalone_mode=False)
    assert isinstance(result.exception, HearthError)
    assert result.exception.code == "engine_missing"
    assert not cache.exists()
