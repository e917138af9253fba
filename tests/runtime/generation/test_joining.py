"""Rows that join and leave between two steps, on the simulated engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import PATIENCE
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import Ready
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.simulated_engine import simulated_config, simulated_next_tokens
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest, RowToken

VOCAB, PLACES = 97, 4
CONFIG = simulated_config(
    vocab_size=VOCAB, layers=2, max_batch=PLACES, capacity=600, prefill_chunk=16
)


@pytest.fixture(params=[0, 1])
def runtime(request: pytest.FixtureRequest) -> LLMInferenceRuntime:
    """A runtime that reads tokens at once, and one that reads them a step later."""
    device = CpuDevice()
    device.steps_ahead = request.param
    return LLMInferenceRuntime.create(DeploymentConfig(CONFIG), Path(), EngineOptions(), device)


def row(token_ids: list[int], max_tokens: int) -> RowRequest:
    return RowRequest(
        token_ids=token_ids,
        prompt_length=len(token_ids),
        options=RequestOptions(max_tokens=max_tokens),
    )


def expected(token_ids: list[int], tokens: int) -> list[int]:
    """What the simulated engine gives after `token_ids`."""
    grown = list(token_ids)
    for _ in range(tokens):
        last, position = np.array(grown[-1:]), np.array([len(grown) - 1])
        grown += simulated_next_tokens(last, position, VOCAB, CONFIG.eos_token_ids).tolist()
    return grown[len(token_ids) :]


class Replies:
    """Steps a runtime and keeps what each row reports."""

    def __init__(self, runtime: LLMInferenceRuntime) -> None:
        self.runtime = runtime
        self.kinds: list[str] = []
        self.tokens: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}

    def step(self, steps: int = 1) -> StepResult:
        for _ in range(steps):
            result = self.runtime.step()
            self.kinds.append(result.kind)
            for token in result.tokens:
                self._take(token)
        return result

    def drain(self) -> dict[int, list[int]]:
        while self.runtime.active:
            self.step()
        return self.tokens

    def _take(self, token: RowToken) -> None:
        if token.error is not None:
            self.errors[token.row] = token.error
        else:
            self.tokens.setdefault(token.row, []).append(token.token_id)


def test_a_row_joins_rows_that_decode(runtime: LLMInferenceRuntime) -> None:
    replies, late = Replies(runtime), list(range(1, 50))
    assert runtime.admit([row([3], 40), row([4], 40)]) == [0, 1]
    replies.step(5)
    assert (runtime.admit([row(late, 9)]), runtime.free) == ([2], 1)
    assert replies.drain() == {
        0: expected([3], 40),
        1: expected([4], 40),
        2: expected(late, 9),
    }
    # Chunks take turns with the decode steps of the others.
    first = replies.kinds.index("prefill", 1)
    last = len(replies.kinds) - replies.kinds[::-1].index("prefill")
    assert set(replies.kinds[first:last:2]) == {"prefill"}
    assert set(replies.kinds[first + 1 : last : 2]) == {"decode"}


def test_a_place_is_free_at_the_border_where_its_row_ends(runtime: LLMInferenceRuntime) -> None:
    replies = Replies(runtime)
    runtime.admit([row([3 + number], 3 + 40 * (number > 0)) for number in range(PLACES)])
    assert runtime.free == 0
    with pytest.raises(HearthError) as caught:
        runtime.admit([row([9], 2)])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "rows")
    while not runtime.free:
        replies.step()
    # On a device that works beside the host the last token may still be unread.
    assert len(replies.tokens[0]) >= 2
    assert runtime.admit([row([9], 2)]) == [PLACES]
    assert replies.drain() == {
        0: expected([3], 3),
        **{number: expected([3 + number], 43) for number in range(1, PLACES)},
        PLACES: expected([9], 2),
    }


def test_one_row_is_given_back_and_continues_among_others(runtime: LLMInferenceRuntime) -> None:
    replies = Replies(runtime)
    runtime.admit([row([3], 30), row([4], 30)])
    replies.step(8)
    done = runtime.release(0)
    assert done == replies.tokens[0] == expected([3], 30)[: len(replies.tokens[0])]
    assert (runtime.release(0), runtime.release(7)) == (None, None)
    replies.step(3)
    again = structs.replace(row([3], 30), token_ids=[3, *done])
    assert runtime.admit([again]) == [2]
    replies.drain()
    assert done + replies.tokens[2] == expected([3], 30)
    assert replies.tokens[1] == expected([4], 30)


def test_a_row_whose_last_token_is_read_or_unread_is_not_given_back(
    runtime: LLMInferenceRuntime,
) -> None:
    replies = Replies(runtime)
    runtime.admit([row([3], 3), row([4], 30)])
    while runtime.free < PLACES - 1:
        replies.step()
    assert runtime.release(0) is None
    assert replies.drain()[0] == expected([3], 3)


def test_a_row_that_leaves_before_its_first_step_reports_nothing(
    runtime: LLMInferenceRuntime,
) -> None:
    replies = Replies(runtime)
    runtime.admit([row([3], 6)])
    replies.step(2)
    runtime.admit([row([4], 5), row([5], 5)])
    runtime.leave(1)
    assert runtime.free == PLACES - 2
    assert replies.drain() == {0: expected([3], 6), 2: expected([5], 5)}


def test_short_newcomers_do_not_keep_a_long_prompt_waiting(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One token costs as much as 0.1 decode steps: a chunk has 16 of them.
    monkeypatch.setattr("hearth.runtime.generation.prefill_budget.PrefillBudget.tokens", 16)
    replies, long = Replies(runtime), list(range(1, 90))
    runtime.admit([row([3], 400)])
    replies.step(3)
    (number,) = runtime.admit([row(long, 3)])
    for _ in range(200):
        while runtime.free:
            runtime.admit([row([5] * 12, 1)])
        replies.step()
        if number in replies.tokens:
            break
    assert replies.tokens[number] == expected(long, 1)
    # Six chunks of its own, and between two of them no more than the house lets pass.
    assert replies.kinds.count("prefill") <= 6 * (PATIENCE + PLACES)


class Failing:
    """Raises `code` in every prefill of a row with token 13 in its chunk."""

    def __init__(self, runtime: LLMInferenceRuntime, code: Code) -> None:
        self._runner, self._code = runtime._runner, code
        self._execute: Callable[..., object] = self._runner.execute_prefill_step

    def __call__(self, token_ids: np.ndarray, *step: Any) -> object:
        found = self._execute(token_ids, *step)
        if (token_ids == 13).any():
            raise HearthError(self._code, "as asked")
        return found


def test_a_prefill_that_fails_harms_nobody_else(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(runtime, "out_of_memory")
    monkeypatch.setattr(runtime._runner, "execute_prefill_step", failing)
    replies, told = Replies(runtime), []
    runtime.admit([row([3], 20), row([4], 20)])
    replies.step(4)
    runtime.admit([row([*range(20, 40), 13], 9)])
    while runtime.active:
        result = replies.step()
        if result.failure is not None:
            told.append((result.kind, result.failure.code, len(result.tokens)))
            assert runtime.admit([row([5, 6], 7)]) == [3]
    assert told == [("prefill", "out_of_memory", 1)]
    assert replies.errors == {2: "out_of_memory"}
    assert replies.tokens == {0: expected([3], 20), 1: expected([4], 20), 3: expected([5, 6], 7)}


@pytest.mark.parametrize("error", [HearthError("executor_failed", "as asked"), MemoryError()])
def test_a_prefill_that_fails_alone_leaves_an_empty_house(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    runtime.admit([row([3], 20), row([4], 20)])
    with monkeypatch.context() as once:
        once.setattr(runtime._runner, "execute_prefill_step", fail)
        result = runtime.step()
    assert result.failure is not None
    code = "executor_failed" if isinstance(error, HearthError) else "out_of_memory"
    assert [token.error for token in result.tokens] == [code] * 2
    assert (runtime.active, runtime.free) == (False, PLACES)
    assert runtime.admit([row([5], 3)]) == [0]
    assert Replies(runtime).drain() == {0: expected([5], 3)}


def test_a_prefill_whose_numbers_never_come_ends_its_rows(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise HearthError("executor_failed", "as asked")

    replies = Replies(runtime)
    runtime.admit([row([3], 6)])
    with monkeypatch.context() as once:
        once.setattr(Ready, "result", fail)
        result = runtime.step()
    assert (result.kind, [token.error for token in result.tokens]) == (
        "prefill",
        ["executor_failed"],
    )
    runtime.admit([row([4], 6)])
    assert replies.drain() == {0: expected([4], 6)}


def test_a_lost_device_takes_all_rows(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(runtime, "device_lost")
    monkeypatch.setattr(runtime._runner, "execute_prefill_step", failing)
    runtime.admit([row([3], 20)])
    replies = Replies(runtime)
    replies.step(3)
    runtime.admit([row([13], 5)])
    with pytest.raises(HearthError, match="as asked"):
        replies.step(3)
    assert (runtime.active, runtime.free) == (False, PLACES)


def test_a_step_that_only_rows_of_the_past_were_in_is_not_told(
    runtime: LLMInferenceRuntime,
) -> None:
    replies = Replies(runtime)
    runtime.admit([row([3], 20)])
    replies.step(4)
    runtime.leave(0)
    assert runtime.admit([row([4], 3)]) == [0]
    result = replies.step()
    assert (result.kind, [token.token_id for token in result.tokens]) == (
        "prefill",
        expected([4], 1),
    )


def test_chunks_are_sized_by_what_was_measured(runtime: LLMInferenceRuntime) -> None:
    runtime.admit([row([3], 60)])
    replies = Replies(runtime)
    replies.step(10)
    runtime.admit([row(list(range(1, 60)), 5)])
    replies.step(10)
    assert runtime._times.decode_s.value > 0
    assert runtime._prompts._computed.value > 0


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_a_budget_of_nothing_is_refused(tmp_path: Path, budget: float) -> None:
    write_config(tmp_path, CONFIG)
    with pytest.raises(HearthError) as caught:
        LLMInferenceRuntime.open(tmp_path, RuntimeOptions(prefill_budget=budget))
    assert (caught.value.code, caught.value.field) == ("invalid_value", "prefill_budget")


def test_the_budget_is_the_one_asked_for(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    runtime = LLMInferenceRuntime.open(tmp_path, RuntimeOptions(prefill_budget=0.25))
    assert runtime._prompts._share == 0.25
