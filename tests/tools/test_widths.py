import json
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.device.device import Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.runner.bindings import CapturedSteps
from tests.bench.running import run
from tools import widths
from tools.widths import Amounts, WidthTimes, parents, width_figures, width_times


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

    monkeypatch.setattr(widths, "gpu_facts", lambda: None)
    monkeypatch.setattr(widths, "gpu_engine", lambda *given: tmp_path / given[2].engine)
    monkeypatch.setattr(widths, "width_times", only_kernels)
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    kept = tmp_path / "step.json"
    code, figures = run("--model", "0.6b", "--record", str(kept), command=widths.widths)
    assert code == 0
    assert figures["prefill/512"]["vs_ort_cuda"] is None
    assert json.loads(kept.read_text())["figures"] == figures


def test_a_node_follows_its_parent_and_each_has_four_children() -> None:
    assert parents(8) == [-1, 0, 0, 0, 0, 1, 1, 1]
    assert parents(1) == [-1]


@pytest.mark.slow
def test_an_engine_is_timed_in_all_widths(toy: Path) -> None:
    amounts = Amounts(trees=(2, 5), prompt=128, windows=1, launches=2)
    times = width_times(toy, amounts)
    assert set(times.tree_ms) == {2, 5}
    assert min(times.step_ms, times.prompt_ms, *times.tree_ms.values()) > 0
    assert (times.prompt, times.context) == (128, 128)


@pytest.mark.slow
def test_what_is_timed_was_captured(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[bool] = []
    execute = EngineExecutor.execute

    def counted(self: EngineExecutor, stream: Stream) -> bool:
        captured.append(execute(self, stream))
        return captured[-1]

    monkeypatch.setattr(EngineExecutor, "execute", counted)
    # What kernels record around a step is none of the executor's graphs.
    monkeypatch.setattr(CapturedSteps, "capture", lambda *_: None)
    amounts = Amounts(trees=(2, 5), prompt=128, windows=1, launches=2)
    width_times(toy, amounts)
    warm_up_and_window = 4
    assert sum(captured) >= warm_up_and_window * 2 * amounts.launches * 2
