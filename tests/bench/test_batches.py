import pytest

from hearth.bench.batches import rows_of, run_batch
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowToken

PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9]


def test_a_batch_gives_its_tokens_and_its_times(runtime: LLMInferenceRuntime) -> None:
    rows = rows_of(PROMPTS, RequestOptions(max_tokens=20, ignore_eos=True))
    run = run_batch(runtime, rows)
    assert [len(one) for one in run.token_ids] == [20, 20]
    assert run.generated == 38
    assert run.steps[0].kind == "prefill"
    assert "verify" in {step.kind for step in run.steps}
    inside = sum(step.seconds for step in run.steps)
    assert 0 < inside <= run.prefill_s + run.generation_s
    assert not runtime.active


def test_rows_that_end_are_live_no_more(runtime: LLMInferenceRuntime) -> None:
    rows = [
        row
        for prompt, tokens in zip(PROMPTS, (3, 20), strict=True)
        for row in rows_of([prompt], RequestOptions(max_tokens=tokens, ignore_eos=True))
    ]
    steps = run_batch(runtime, rows).steps
    assert [step.rows for step in steps] == sorted((step.rows for step in steps), reverse=True)
    assert {step.rows for step in steps} == {1, 2}


def test_a_wish_is_the_row_s(runtime: LLMInferenceRuntime) -> None:
    rows = rows_of(PROMPTS, RequestOptions(max_tokens=20, ignore_eos=True, speculation=False))
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
        run_batch(runtime, rows_of(PROMPTS, RequestOptions(max_tokens=4)))
    assert not runtime.active
