"""Rows of a runtime, and those whose numbers are not finite."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import DeviceKind, FileRecord
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import Device, Stream
from hearth.runtime.device.open import open_device
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding, EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import (
    SimulatedEngine,
    simulated_config,
    simulated_next_tokens,
)
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


VOCAB, POISON, ENDS = 40, 7, (0,)
FAILING = simulated_config(
    vocab_size=VOCAB, layers=1, max_batch=4, capacity=64, prefill_chunk=8, eos_token_ids=ENDS
)


class Spreading(SimulatedEngine):
    """`POISON` leaves keys that are not finite, and one such slot spoils all logits of its row."""

    def run(self, bindings: Sequence[Binding], stream: Stream) -> None:
        super().run(bindings, stream)
        arrays = {one.name: one.tensor.view(one.shape) for one in bindings}
        tokens, keys = arrays["inputs_embeds"][..., 0], arrays["k_cache_0"]
        for row, start in enumerate(arrays["kvcache_start_index"].tolist()):
            keys[row, :, start : start + tokens.shape[1]] = 0
            for step in np.flatnonzero(tokens[row] == POISON).tolist():
                keys[row, :, start + step] = np.nan
            if np.isnan(keys[row]).any():
                arrays["logits"][row] = np.nan


@pytest.fixture(params=[(0, False), (1, False), (1, True)])
def failing_runtime(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> LLMInferenceRuntime:
    """Runtimes that read tokens at once or a step later, and one that pads as on a GPU."""
    monkeypatch.setattr("hearth.runtime.executor.engine_executor.SimulatedEngine", Spreading)
    device = CpuDevice()
    device.steps_ahead, padded = request.param
    if padded:
        monkeypatch.setattr("hearth.runtime.runner.bindings.decode_batches", lambda _: (1, 2, 4))
        monkeypatch.setattr("hearth.runtime.tensors.profiles.prefill_widths", lambda _: (3, 5, 8))
    return LLMInferenceRuntime.create(DeploymentConfig(FAILING), Path(), EngineOptions(), device)


def row(token_ids: list[int], max_tokens: int) -> RowRequest:
    return RowRequest(
        token_ids=token_ids,
        prompt_length=len(token_ids),
        options=RequestOptions(max_tokens=max_tokens),
    )


def expected(request: RowRequest) -> list[int]:
    """The row's tokens, -1 where it fails: when `POISON` is in what was fed."""
    grown, limit = list(request.token_ids), request.options.max_tokens or 0
    while POISON not in grown and len(grown) < request.prompt_length + limit:
        newest, position = np.array(grown[-1:]), np.array([len(grown) - 1])
        grown += simulated_next_tokens(newest, position, VOCAB, ENDS).tolist()
    made = grown[request.prompt_length :]
    fails = POISON in grown and len(made) < limit
    return [*made, -1] if fails else made


def drain(runtime: LLMInferenceRuntime, cancels: dict[int, int]) -> dict[int, list[int]]:
    """Step to the end; row `cancels[n]` is cancelled before step n."""
    tokens: dict[int, list[int]] = {}
    for number in range(1000):
        if number in cancels:
            runtime.leave(cancels[number])
        if not runtime.active:
            break
        for token in runtime.step().tokens:
            tokens.setdefault(token.row, []).append(token.token_id)
    return tokens


def check(runtime: LLMInferenceRuntime, rows: list[RowRequest], **cancels: Any) -> None:
    runtime.admit(rows)
    found = drain(runtime, cancels.get("cancels", {}))
    # The places that rows leave are cleaned before others take them.
    runtime._clear("look")
    for index, request in enumerate(rows):
        text = found.get(index, [])
        whole = index not in cancels.get("cancels", {}).values()
        assert text == (expected(request) if whole else expected(request)[: len(text)])
    caches = runtime._runner.get_kv_cache().kv
    assert np.isfinite(np.stack([one.array for one in caches.keys])).all()


def test_a_row_that_fails_at_its_limit_spoils_no_other(
    failing_runtime: LLMInferenceRuntime,
) -> None:
    check(failing_runtime, [row([3, 4, POISON, 5], 1), row([3], 9), row([4], 9)])


def test_a_place_that_could_not_be_cleaned_is_cleaned_before_the_next_row(
    failing_runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise HearthError("executor_failed", "nothing can be zeroed")

    failing_runtime.admit([row([3, POISON, 5], 4), row([4], 40)])
    failing_runtime.step()
    with monkeypatch.context() as once:
        once.setattr(failing_runtime._runner.get_kv_cache().kv, "zero", fail)
        with pytest.raises(HearthError, match="zeroed"):
            drain(failing_runtime, {})
    assert not failing_runtime.active
    check(failing_runtime, [row([3], 9)])


def test_a_row_that_fails_behind_its_end_spoils_no_later_batch(
    failing_runtime: LLMInferenceRuntime,
) -> None:
    for _ in range(2):
        check(failing_runtime, [row([3, POISON], 1)])
        check(failing_runtime, [row([3], 9)])


@pytest.mark.parametrize("seed", range(20))
def test_only_rows_that_fail_are_spoiled(failing_runtime: LLMInferenceRuntime, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        rows = [
            row(rng.integers(1, VOCAB, rng.integers(1, 20)).tolist(), int(rng.integers(1, 12)))
            for _ in range(rng.integers(1, 5))
        ]
        chosen = rng.integers(0, (12, len(rows)), (int(rng.integers(0, 3)), 2)).tolist()
        check(failing_runtime, rows, cancels=dict(chosen))


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_join_get_nothing_of_those_that_failed(
    failing_runtime: LLMInferenceRuntime, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    asked: dict[int, RowRequest] = {}
    found: dict[int, list[int]] = {}
    cancelled: set[int] = set()

    def judge() -> None:
        for number, request in asked.items():
            text, right = found.get(number, []), expected(request)
            assert text == (right[: len(text)] if number in cancelled else right)
        asked.clear()
        found.clear()
        cancelled.clear()

    for _ in range(150):
        if not failing_runtime.active:
            judge()
        if failing_runtime.free and (rng.random() < 0.4 or not failing_runtime.active):
            length, tokens = int(rng.integers(1, 25)), int(rng.integers(1, 12))
            request = row(rng.integers(1, VOCAB, length).tolist(), tokens)
            asked[failing_runtime.admit([request])[0]] = request
        if asked and rng.random() < 0.05:
            number = int(rng.choice(list(asked)))
            cancelled.add(number)
            failing_runtime.leave(number)
        if failing_runtime.active:
            for token in failing_runtime.step().tokens:
                found.setdefault(token.row, []).append(token.token_id)


def test_what_a_padded_step_writes_at_a_joiner_s_place_goes_with_it(
    failing_runtime: LLMInferenceRuntime,
) -> None:
    # The newest token at the last place is POISON, and it is never fed to a row of its own.
    first = next(n for n in range(1, VOCAB) if expected(row([n], 1)) == [POISON])
    calm = next(n for n in range(1, VOCAB) if POISON not in expected(row([n], 20)))
    failing_runtime.admit([row([calm], 20)] * 3)
    failing_runtime.step()
    (short,) = failing_runtime.admit([row([first], 1)])
    while short not in {token.row for token in failing_runtime.step().tokens}:
        pass
    (joiner,) = failing_runtime.admit([row([calm] * 24, 9)])
    lengths = failing_runtime._runner.get_kv_cache()
    while lengths.row_lengths[3:] != [8]:
        failing_runtime.step()
    assert failing_runtime.step().kind in {"prefill", "decode"}
    failing_runtime.leave(joiner)
    (late,) = failing_runtime.admit([row([calm], 20)])
    found = drain(failing_runtime, {})
    assert found[late] == expected(row([calm], 20))
