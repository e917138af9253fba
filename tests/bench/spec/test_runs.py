import pytest

from bench.spec.runs import batches, greedy_rows, metrics_since, run_batch
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.request import RowRound, RowToken

PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9]


def test_a_batch_gives_its_tokens_and_its_times(runtime: LLMInferenceRuntime) -> None:
    rows = greedy_rows(PROMPTS, 20, ignore_eos=True)
    run = run_batch(runtime, rows)
    assert [len(one) for one in run.token_ids] == [20, 20]
    assert run.generated == 38
    assert run.steps[0].kind == "prefill"
    assert "verify" in {step.kind for step in run.steps}
    inside = sum(step.seconds for step in run.steps)
    assert 0 < inside <= run.prefill_s + run.generation_s
    assert not runtime.active


def test_rows_that_end_are_live_no_more(runtime: LLMInferenceRuntime) -> None:
    short, long = (greedy_rows([p], n, ignore_eos=True)[0] for p, n in zip(PROMPTS, (3, 20)))  # noqa: B905
    steps = run_batch(runtime, [short, long]).steps
    assert [step.rows for step in steps] == sorted((step.rows for step in steps), reverse=True)
    assert {step.rows for step in steps} == {1, 2}


def test_a_wish_is_the_row_s(runtime: LLMInferenceRuntime) -> None:
    rows = greedy_rows(PROMPTS, 20, speculation=False, ignore_eos=True)
    assert {step.kind for step in run_batch(runtime, rows).steps} == {"prefill", "decode"}


def test_a_row_that_fails_ends_the_run(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = runtime.step

    def failing() -> object:
        result = step()
        result.tokens = [RowToken(1, -1, error="non_finite")]
        return result

    monkeypatch.setattr(runtime, "step", failing)
    with pytest.raises(HearthError, match="row 1 failed"):
        run_batch(runtime, greedy_rows(PROMPTS, 4))
    assert not runtime.active


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
