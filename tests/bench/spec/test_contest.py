import pytest

from hearth.bench.batches import BatchRun, TimedStep, run_batch
from hearth.bench.spec import contest
from hearth.bench.spec.contest import (
    MixedFigures,
    Repeat,
    batches,
    measure_contest,
    measure_mixed,
    metrics_since,
    spec_figures,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RowRequest, RowRound, RowToken
from hearth.runtime.speculation.policy import EagleGenerationMetrics


def run(tokens: list[list[int]], seconds: float, *kinds: str) -> BatchRun:
    steps = [TimedStep(kind, 0.01, 1) for kind in ("prefill", *kinds)]  # type: ignore[arg-type]  # the three
    rows = [[RowToken(0, token) for token in row] for row in tokens]
    return BatchRun(rows=rows, steps=steps, prefill_s=1.0, generation_s=seconds)


def repeat(vanilla_s: float, ours_s: float) -> Repeat:
    vanilla = run([[1, 2, 3, 4, 5], [6, 7]], vanilla_s, "decode", "decode", "decode", "decode")
    ours = run([[1, 2, 3, 4, 5], [6, 8]], ours_s, "verify", "decode")
    return Repeat([vanilla], [ours])


def test_speeds_are_of_tokens_after_the_first_and_medians_over_the_repeats() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record([RowRound(0, 4, 3)], draft_s=0.002, verify_s=0.004, commit_s=0.001)
    repeats = [repeat(1.0, 0.5), repeat(1.0, 0.25), repeat(2.0, 0.5)]
    found = spec_figures(2, repeats, metrics)
    assert found.vanilla_tokens_per_s == 5.0
    assert found.tokens_per_s == 10.0
    assert found.speedup == 4.0
    assert found.speedup_with_prefill == pytest.approx(2.0 / 1.25)
    assert (found.prompts, found.equal_replies) == (2, 0.5)
    assert (found.accept_length, found.rounds, found.drafted) == (3.0, 1, 4)
    assert found.round_share == 0.5
    assert found.vanilla_step_ms == 250.0
    assert (found.draft_ms, found.verify_ms, found.commit_ms) == (2.0, 4.0, 1.0)


def test_without_rounds_there_is_no_length_and_no_stage() -> None:
    # The policy may have stopped after the pass that is not counted.
    stopped = EagleGenerationMetrics(accepted_by_position=[0, 0])
    found = spec_figures(1, [repeat(1.0, 1.0)], stopped)
    assert (found.accept_length, found.draft_ms, found.verify_ms) == (None, None, None)
    assert found.speedup == 1.0


def test_both_ways_run_the_same_prompts_in_turns(runtimes: list[LLMInferenceRuntime]) -> None:
    prompts = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12, [1, 2, 3]]
    seen: list[tuple[int, int]] = []
    found = measure_contest(
        (runtimes[0], runtimes[1]),
        prompts,
        2,
        max_tokens=24,
        repeats=2,
        progress=lambda *progress: seen.append(progress),
    )
    assert seen == [(0, 4), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert (found.batch, found.prompts, found.equal_replies) == (2, 4, 1.0)
    assert found.accept_length is not None
    assert found.accept_length >= 1.0
    assert found.accept_rates[0] == 1.0
    # The pass that warms up is not counted.
    assert 0 < found.rounds < runtimes[1].speculation_metrics.rounds
    assert found.speedup == pytest.approx(found.tokens_per_s / found.vanilla_tokens_per_s, rel=0.9)


def test_batches_are_full_ones() -> None:
    prompts = [[number] for number in range(7)]
    assert list(batches(prompts, 3)) == [[[0], [1], [2]], [[3], [4], [5]]]
    assert list(batches(prompts, 8)) == []


def test_counters_are_read_between_two_moments() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record([RowRound(0, 4, 3)], draft_s=1.0, verify_s=2.0, commit_s=3.0)
    before = EagleGenerationMetrics(
        steps=1, rounds=1, drafted=4, accepted=3, accepted_by_position=[1, 1, 1], draft_s=1.0
    )
    before.verify_s, before.commit_s = 2.0, 3.0
    metrics.record([RowRound(0, 4, 5)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    found = metrics_since(before, metrics)
    alone = EagleGenerationMetrics()
    alone.record([RowRound(0, 4, 5)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    assert found == alone


PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12]


def measure(runtime: LLMInferenceRuntime, batch: int = 4) -> MixedFigures:
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
        steps = [TimedStep("prefill", 9.0, 4), TimedStep(kind, seconds, 4)]  # type: ignore[arg-type] # one of the three
        # A step with fewer rows does not count.
        steps.append(TimedStep(kind, 99.0, 3))  # type: ignore[arg-type] # likewise
        return BatchRun(rows=[], steps=steps, prefill_s=0.0, generation_s=0.0)

    monkeypatch.setattr(contest, "run_batch", fake)
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

    monkeypatch.setattr(contest, "run_batch", without_rounds)
    with pytest.raises(HearthError, match="never came"):
        measure(runtime)
