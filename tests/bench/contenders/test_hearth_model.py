from pathlib import Path

import pytest
from msgspec import structs

from hearth.bench.contenders.contender import Job
from hearth.bench.contenders.hearth_model import HearthModel
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest

PROMPT = [5, 77, 200, 31]


def job(engine: Path, steps: int, *, spin: bool | None = None) -> Job:
    return Job(
        contender="hearth", path=str(engine), threads=1, prompt=PROMPT, steps=steps, spin=spin
    )


def test_its_steps_are_those_of_a_whole_request(toy: Path) -> None:
    model = HearthModel(job(toy, 10))
    stepped = [model.prefill(), *(model.step() for _ in range(10))]
    runtime = LLMInferenceRuntime.open(toy, RuntimeOptions(threads=1))
    row = RowRequest(
        token_ids=list(PROMPT),
        prompt_length=4,
        options=RequestOptions(max_tokens=11, ignore_eos=True),
    )
    assert stepped == runtime.handle_request(GenerationRequest(rows=[row])).rows[0].token_ids
    runtime.close()


@pytest.mark.parametrize("spin", [None, True, False])
def test_spinning_follows_the_job(
    toy: Path,
    spin: bool | None,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    opened = LLMInferenceRuntime.open

    def spy(folder: Path, options: RuntimeOptions) -> LLMInferenceRuntime:
        seen.append(options.spin)
        return opened(folder, options)

    monkeypatch.setattr("hearth.bench.contenders.hearth_model.LLMInferenceRuntime.open", spy)
    HearthModel(job(toy, 1, spin=spin))
    assert seen == [RuntimeOptions().spin if spin is None else spin]


def test_more_steps_than_the_capacity_are_refused(toy: Path) -> None:
    with pytest.raises(HearthError) as caught:
        HearthModel(job(toy, 5000)).prefill()
    assert caught.value.code == "capacity_exceeded"


def test_rows_of_a_batch_step_together_from_a_captured_graph(toy: Path) -> None:
    batch = structs.replace(job(toy, 5), batch=3, capture=True)
    model = HearthModel(batch)
    alone = HearthModel(job(toy, 5))
    assert [model.prefill(), *(model.step() for _ in range(5))] == [
        alone.prefill(),
        *(alone.step() for _ in range(5)),
    ]
    assert model._runtime.counters.hits == 5


def test_raw_launches_change_nothing(toy: Path) -> None:
    model, other = (HearthModel(structs.replace(job(toy, 6), capture=True)) for _ in "ab")
    assert model.prefill() == other.prefill()
    first = [model.step() for _ in range(3)]
    hits = model._runtime.counters.hits
    assert model.launch(10) > 0
    assert model._runtime.counters.hits == hits + 10
    assert first + [model.step() for _ in range(3)] == [other.step() for _ in range(6)]


def test_raw_launches_find_rows_that_go_on(toy: Path) -> None:
    model = HearthModel(job(toy, 6))
    model.prefill()
    for _ in range(6):
        model.step()
    assert model._runtime.active
    assert max(model._runtime._runner.get_kv_cache().row_lengths) >= len(PROMPT) + 6
    assert model.launch(2) > 0
    model.close()
