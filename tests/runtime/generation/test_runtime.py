import time
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import DeviceKind, FileRecord
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import Device
from hearth.runtime.device.open import open_device
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import simulated_config, simulated_next_tokens
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.memory.sizes import kv_cache_bytes
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest

CONFIG = simulated_config(vocab_size=97, layers=2, max_batch=4, capacity=600, prefill_chunk=16)


@pytest.fixture(params=[0, 1])
def runtime(request: pytest.FixtureRequest) -> LLMInferenceRuntime:
    """A runtime that reads tokens at once, and one that reads them a step later."""
    device = CpuDevice()
    device.steps_ahead = request.param
    return LLMInferenceRuntime.create(DeploymentConfig(CONFIG), Path(), EngineOptions(), device)


def _row(token_ids: list[int], max_tokens: int = 5, prompt: int | None = None) -> RowRequest:
    length = len(token_ids) if prompt is None else prompt
    return RowRequest(
        token_ids=token_ids, prompt_length=length, options=RequestOptions(max_tokens=max_tokens)
    )


def _expected(token_ids: list[int], tokens: int) -> list[int]:
    """What the simulated engine gives after `token_ids`."""
    grown = list(token_ids)
    for _ in range(tokens):
        last, position = np.array(grown[-1:]), np.array([len(grown) - 1])
        grown += simulated_next_tokens(last, position, 97, CONFIG.eos_token_ids).tolist()
    return grown[len(token_ids) :]


def _drain(runtime: LLMInferenceRuntime) -> dict[int, list[int]]:
    """Step to the end; each row's tokens by the caller's index."""
    tokens: dict[int, list[int]] = {}
    while runtime.active:
        for token in runtime.step().tokens:
            tokens.setdefault(token.row, []).append(token.token_id)
    return tokens


def test_rows_of_all_lengths_keep_the_callers_order(runtime: LLMInferenceRuntime) -> None:
    prompts = [[3], list(range(40)), [5, 6, 7], list(range(16))]
    runtime.admit([_row(prompt, 4 + index) for index, prompt in enumerate(prompts)])
    tokens = _drain(runtime)
    for index, prompt in enumerate(prompts):
        assert tokens[index] == _expected(prompt, 4 + index)


def test_a_step_is_one_prefill_chunk_or_one_decode(runtime: LLMInferenceRuntime) -> None:
    runtime.admit([_row([3], 2), _row(list(range(40)), 2)])
    before = time.monotonic()
    steps = [runtime.step() for _ in range(5)]
    assert not runtime.active
    # Chunks and decode steps take turns while a row decodes.
    assert [step.kind for step in steps] == ["prefill", "decode", "prefill", "prefill", "decode"]
    assert [[token.row for token in step.tokens] for step in steps] == [[0], [0], [], [1], [1]]
    assert [step.tokens[0].finish for step in (steps[1], steps[4])] == ["length", "length"]
    assert before <= steps[0].started <= steps[0].ended <= steps[1].started <= time.monotonic()


def test_a_row_of_one_token_leaves_during_prefill(
    runtime: LLMInferenceRuntime,
) -> None:
    runtime.admit([_row([3], 1), _row(list(range(40)), 2)])
    assert [token.finish for token in runtime.step().tokens] == ["length"]
    assert _drain(runtime) == {1: _expected(list(range(40)), 2)}


def test_a_cancelled_row_reports_nothing_more(runtime: LLMInferenceRuntime) -> None:
    runtime.admit([_row([3]), _row([4]), _row([5])])
    runtime.step()
    runtime.leave(1)
    runtime.leave(99)
    tokens = _drain(runtime)
    assert tokens == {0: _expected([3], 5)[1:], 2: _expected([5], 5)[1:]}


def test_a_batch_whose_rows_are_all_cancelled_is_over(runtime: LLMInferenceRuntime) -> None:
    runtime.admit([_row([3])])
    runtime.leave(0)
    assert not runtime.active
    assert runtime.release(0) is None
    with pytest.raises(HearthError, match="no row is active"):
        runtime.step()


def test_without_a_batch_nothing_is_active(runtime: LLMInferenceRuntime) -> None:
    runtime.leave(0)
    assert not runtime.active
    assert runtime.release(0) is None
    assert runtime.free == 4


def test_unfinished_rows_continue_identically(runtime: LLMInferenceRuntime) -> None:
    prompts = [[3], list(range(20))]
    runtime.admit([_row(prompt, 30) for prompt in prompts])
    for _ in range(10):
        runtime.step()
    unfinished = [runtime.release(number) for number in (0, 1)]
    assert not runtime.active
    assert unfinished == [_expected(prompts[0], 9), _expected(prompts[1], 8)]
    again = [
        _row(p + (done or []), 30, len(p)) for p, done in zip(prompts, unfinished, strict=True)
    ]
    assert runtime.admit(again) == [0, 1]
    tokens = _drain(runtime)
    for index, prompt in enumerate(prompts):
        assert (unfinished[index] or []) + tokens[index] == _expected(prompt, 30)


def test_a_row_may_fill_its_capacity(runtime: LLMInferenceRuntime) -> None:
    runtime.admit([_row(list(range(90)) * 6, 60), _row([1], 3)])
    tokens = _drain(runtime)
    assert tokens[0] == _expected(list(range(90)) * 6, 60)


def test_a_step_may_be_queued_later_while_another_runs(runtime: LLMInferenceRuntime) -> None:
    assert runtime.queue_by == 0.0
    runtime.admit([_row([3, 1], 9)])
    runtime.step()
    runtime.step()
    runtime.step()
    ahead = bool(runtime._device.steps_ahead)
    assert (runtime.queue_by >= runtime._times.collected) == ahead
    # A prompt that goes on is not kept waiting.
    runtime.admit([_row(list(range(40)))])
    while not runtime._context.joiners:
        runtime.step()
    assert runtime.queue_by == 0.0
    _drain(runtime)


def test_captured_steps_are_hit(runtime: LLMInferenceRuntime) -> None:
    runtime.capture([1, 2])
    runtime.admit([_row([3, 1], 3), _row([4, 1], 6)])
    _drain(runtime)
    counters = runtime.counters
    assert (counters.captures, counters.hits, counters.misses) == (2 * 4, 5, 1)


def test_a_batch_is_refused_whole(runtime: LLMInferenceRuntime) -> None:
    for rows, code, field in (
        ([], "invalid_value", "rows"),
        ([_row([3])] * 5, "invalid_value", "rows"),
        ([_row([3]), _row([97])], "invalid_value", "token_ids"),
        ([_row([3]), _row([3], 600)], "capacity_exceeded", "max_tokens"),
    ):
        with pytest.raises(HearthError) as caught:
            runtime.admit(rows)
        assert (caught.value.code, caught.value.field) == (code, field)
        assert not runtime.active
    runtime.admit([_row([3])])


def test_settings_of_sampling_are_checked_first(
    runtime: LLMInferenceRuntime,
) -> None:
    row = structs.replace(_row([3]), options=RequestOptions(temperature=-1.0))
    for call in (runtime.check, lambda bad: runtime.admit([bad])):
        with pytest.raises(HearthError) as caught:
            call(row)
        assert caught.value.field == "temperature"
    assert not runtime.active


def test_what_needs_an_empty_house_is_refused_in_a_taken_one(
    runtime: LLMInferenceRuntime,
) -> None:
    runtime.admit([_row([3])])
    with pytest.raises(HearthError, match="capture while no row is active"):
        runtime.capture([1])
    with pytest.raises(HearthError, match="take a whole request while no row is active"):
        runtime.handle_request(GenerationRequest(rows=[_row([3])]))
    runtime.leave(0)
    with pytest.raises(HearthError, match="1 to 4 rows"):
        runtime.capture([5])


def test_a_batch_that_has_ended_makes_room_by_itself(runtime: LLMInferenceRuntime) -> None:
    runtime.admit([_row([3]), _row([4])])
    _drain(runtime)
    runtime.admit([_row([5])])
    assert _drain(runtime) == {0: _expected([5], 5)}


def test_a_failed_engine_ends_the_batch_and_the_next_one_runs(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.admit([_row([3]), _row([4])])
    runtime.step()
    with monkeypatch.context() as patch:
        patch.setattr(EngineExecutor, "execute", _fail)
        with pytest.raises(HearthError, match="as asked"):
            runtime.step()
    assert (runtime.active, runtime.release(0), runtime.free) == (False, None, 4)
    runtime.admit([_row([3])])
    assert _drain(runtime) == {0: _expected([3], 5)}


def _fail(*_: object) -> None:
    raise HearthError("executor_failed", "as asked")


def test_metrics_count_tokens_by_stage(runtime: LLMInferenceRuntime) -> None:
    runtime.handle_request(GenerationRequest(rows=[_row([3], 3), _row(list(range(20)), 3)]))
    prefill, generation = runtime.prefill_metrics, runtime.generation_metrics
    assert (prefill.steps, prefill.tokens) == (2, 21)
    assert (generation.steps, generation.tokens) == (3, 4)
    assert prefill.seconds > 0


def test_a_folder_is_opened_within_limits(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    runtime = LLMInferenceRuntime.open(tmp_path, RuntimeOptions(max_batch=2, capacity=100))
    assert (runtime.max_batch, runtime.capacity) == (2, 100)
    assert runtime.memory["kv_cache"] == kv_cache_bytes(runtime.config, 2, 100)
    assert runtime.capture([1, 2]) == []
    assert runtime.graphs["base"].captures == runtime.counters.captures > 0
    assert runtime.device_free is None
    assert runtime.config.prefill_chunk == 16
    runtime.close()


def test_what_a_device_takes_is_not_missing_from_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, CONFIG)
    free = [1 << 40]

    def opened(kind: DeviceKind) -> Device:
        free[0] = 0
        return open_device(kind)

    monkeypatch.setattr("hearth.runtime.generation.runtime.available_memory", lambda: free[0])
    monkeypatch.setattr("hearth.runtime.generation.runtime.open_device", opened)
    opening = LLMInferenceRuntime.open(tmp_path)
    assert (opening.max_batch, opening.chosen) == (4, "")


def test_a_damaged_folder_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    write_config(
        tmp_path, structs.replace(CONFIG, files={"tokenizer.json": FileRecord(2, "0" * 64)})
    )
    with pytest.raises(HearthError) as caught:
        LLMInferenceRuntime.open(tmp_path)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "tokenizer.json")
    LLMInferenceRuntime.open(tmp_path, RuntimeOptions(verify=False)).close()
