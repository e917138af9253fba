import pytest

from bench.batches import BatchRun, TimedStep, run_batch
from bench.spec import mixed
from bench.spec.mixed import measure_mixed
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from runtime.request import RowRequest

PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12]


def measure(runtime: LLMInferenceRuntime, batch: int = 4) -> mixed.MixedFigures:
    return measure_mixed(
        runtime, PROMPTS, batch, max_tokens=24, repeats=2, progress=lambda _done, _total: None
    )


def test_a_mixed_step_is_compared_with_the_dearer_kind(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[bool | None]] = []

    def fake(_runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> BatchRun:
        wishes = [row.options.speculation for row in rows]
        asked.append(wishes)
        assert all(row.options.ignore_eos for row in rows)
        kind, seconds = ("verify", 0.003 * sum(map(bool, wishes))) if any(wishes) else ("decode", 1)
        steps = [TimedStep("prefill", 9.0, 4), TimedStep(kind, seconds, 4)]  # type: ignore[arg-type]
        # A step with fewer rows does not count.
        steps.append(TimedStep(kind, 99.0, 3))  # type: ignore[arg-type]
        return BatchRun(rows=[], steps=steps, prefill_s=0.0, generation_s=0.0)

    monkeypatch.setattr(mixed, "run_batch", fake)
    found = measure(runtime)
    assert asked[:3] == [[False] * 4, [True] * 4, [True, True, False, False]]
    assert (found.vanilla_step_ms, found.round_ms, found.mixed_step_ms) == (1000.0, 12.0, 6.0)
    assert found.over_dearer == pytest.approx(0.006)
    assert (found.batch, found.steps) == (4, 2)


def test_the_three_kinds_of_step_come_from_a_real_engine(runtime: LLMInferenceRuntime) -> None:
    found = measure(runtime)
    assert min(found.mixed_step_ms, found.round_ms, found.vanilla_step_ms) > 0
    dearer = max(found.round_ms, found.vanilla_step_ms)
    assert found.over_dearer == pytest.approx(found.mixed_step_ms / dearer)


def test_a_kind_that_never_comes_is_an_error(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_batch

    def without_rounds(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> BatchRun:
        found = run(runtime, rows)
        found.steps = [step for step in found.steps if step.kind != "verify"]
        return found

    monkeypatch.setattr(mixed, "run_batch", without_rounds)
    with pytest.raises(HearthError, match="never came"):
        measure(runtime)
