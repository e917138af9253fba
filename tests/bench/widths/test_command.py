import json
from pathlib import Path
from typing import Any

import pytest

from bench.widths import command
from bench.widths.command import width_figures
from bench.widths.session import WidthTimes
from runtime.errors import HearthError
from tests.bench.running import run


def times(**changes: Any) -> WidthTimes:
    given = {"step_ms": 0.5, "tree_ms": {8: 0.6, 60: 1.0}, "prompt_ms": 4.0, "prompt": 512}
    return WidthTimes(**{**given, **changes})


def test_trees_are_told_in_steps_and_prompts_beside_onnx_runtime() -> None:
    found = width_figures("0.6b", {"kernels": times(), "ort-cuda": times(prompt_ms=6.0)}, "float16")
    assert list(found) == ["verify/8", "verify/60", "prefill/512"]
    assert found["verify/8"].over_step == pytest.approx(1.2)
    assert (found["verify/8"].context, found["verify/8"].vs_ort_cuda) == (128, None)
    prompt = found["prefill/512"]
    assert prompt.vs_ort_cuda == pytest.approx(1.5)
    assert prompt.tokens_per_s == pytest.approx(128_000)
    assert prompt.context == 0
    assert prompt.over_step == pytest.approx(8)


def test_other_models_are_named_and_without_kernels_there_is_nothing_to_tell() -> None:
    assert list(width_figures("4b", {"kernels": times()}, "float16")) == [
        "verify/8/4b",
        "verify/60/4b",
        "prefill/512/4b",
    ]
    assert width_figures("4b", {"ort-cuda": times()}, "float16") == {}


def test_the_command_leaves_out_what_cannot_run_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_kernels(folder: Path, _: object) -> WidthTimes:
        if folder.name == "onnxruntime":
            raise HearthError("engine_incompatible", "it is absent", "device")
        return times()

    monkeypatch.setattr(command, "gpu_facts", lambda: None)
    monkeypatch.setattr(command, "gpu_engine", lambda *given: tmp_path / given[2].engine)
    monkeypatch.setattr(command, "width_times", only_kernels)
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    kept = tmp_path / "step.json"
    code, figures = run("widths", "--model", "0.6b", "--record", str(kept))
    assert code == 0
    assert figures["prefill/512"]["vs_ort_cuda"] is None
    assert json.loads(kept.read_text())["figures"] == figures
