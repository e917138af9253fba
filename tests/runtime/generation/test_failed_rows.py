"""Rows whose numbers are not finite, beside others and before the next batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding, EngineOptions
from hearth.runtime.executor.simulated_engine import (
    SimulatedEngine,
    simulated_config,
    simulated_next_tokens,
)
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowRequest

VOCAB, POISON, ENDS = 40, 7, (0,)
CONFIG = simulated_config(
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
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LLMInferenceRuntime:
    """Runtimes that read tokens at once or a step later, and one that pads as on a GPU."""
    monkeypatch.setattr("hearth.runtime.executor.engine_executor.SimulatedEngine", Spreading)
    device = CpuDevice()
    device.steps_ahead, padded = request.param
    if padded:
        monkeypatch.setattr("hearth.runtime.runner.bindings.decode_batches", lambda _: (1, 2, 4))
        monkeypatch.setattr("hearth.runtime.tensors.profiles.prefill_widths", lambda _: (3, 5, 8))
    return LLMInferenceRuntime.create(DeploymentConfig(CONFIG), Path(), EngineOptions(), device)


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


def test_a_row_that_fails_at_its_limit_spoils_no_other(runtime: LLMInferenceRuntime) -> None:
    check(runtime, [row([3, 4, POISON, 5], 1), row([3], 9), row([4], 9)])


def test_a_place_that_could_not_be_cleaned_is_cleaned_before_the_next_row(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise HearthError("executor_failed", "nothing can be zeroed")

    runtime.admit([row([3, POISON, 5], 4), row([4], 40)])
    runtime.step()
    with monkeypatch.context() as once:
        once.setattr(runtime._runner.get_kv_cache().kv, "zero", fail)
        with pytest.raises(HearthError, match="zeroed"):
            drain(runtime, {})
    assert not runtime.active
    check(runtime, [row([3], 9)])


def test_a_row_that_fails_behind_its_end_spoils_no_later_batch(
    runtime: LLMInferenceRuntime,
) -> None:
    for _ in range(2):
        check(runtime, [row([3, POISON], 1)])
        check(runtime, [row([3], 9)])


@pytest.mark.parametrize("seed", range(20))
def test_only_rows_that_fail_are_spoiled(runtime: LLMInferenceRuntime, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        rows = [
            row(rng.integers(1, VOCAB, rng.integers(1, 20)).tolist(), int(rng.integers(1, 12)))
            for _ in range(rng.integers(1, 5))
        ]
        chosen = rng.integers(0, (12, len(rows)), (int(rng.integers(0, 3)), 2)).tolist()
        check(runtime, rows, cancels=dict(chosen))


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_join_get_nothing_of_those_that_failed(
    runtime: LLMInferenceRuntime, seed: int
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
        if not runtime.active:
            judge()
        if runtime.free and (rng.random() < 0.4 or not runtime.active):
            length, tokens = int(rng.integers(1, 25)), int(rng.integers(1, 12))
            request = row(rng.integers(1, VOCAB, length).tolist(), tokens)
            asked[runtime.admit([request])[0]] = request
        if asked and rng.random() < 0.05:
            number = int(rng.choice(list(asked)))
            cancelled.add(number)
            runtime.leave(number)
        if runtime.active:
            for token in runtime.step().tokens:
                found.setdefault(token.row, []).append(token.token_id)


def test_what_a_padded_step_writes_at_a_joiner_s_place_goes_with_it(
    runtime: LLMInferenceRuntime,
) -> None:
    # The newest token at the last place is POISON, and it is never fed to a row of its own.
    first = next(n for n in range(1, VOCAB) if expected(row([n], 1)) == [POISON])
    calm = next(n for n in range(1, VOCAB) if POISON not in expected(row([n], 20)))
    runtime.admit([row([calm], 20)] * 3)
    runtime.step()
    (short,) = runtime.admit([row([first], 1)])
    while short not in {token.row for token in runtime.step().tokens}:
        pass
    (joiner,) = runtime.admit([row([calm] * 24, 9)])
    lengths = runtime._runner.get_kv_cache()
    while lengths.row_lengths[3:] != [8]:
        runtime.step()
    assert runtime.step().kind in {"prefill", "decode"}
    runtime.leave(joiner)
    (late,) = runtime.admit([row([calm], 20)])
    found = drain(runtime, {})
    assert found[late] == expected(row([calm], 20))
