"""Whole generations with real engines: what the runtime promises about batches and rows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import load_config
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from tests.references import NAMES, reference_logits
from tests.runtime.conftest import EngineFolders
from tests.runtime.kv_cache.arranged_rows import cache_view

LENGTHS = (3, 40, 17, 1, 250, 8, 25, 90)
SAMPLED = RequestOptions(temperature=1.0, top_p=0.95, repetition_penalty=1.1)


def _open(folder: Path, chunk: int = 256) -> LLMInferenceRuntime:
    config = structs.replace(load_config(folder), prefill_chunk=chunk)
    return LLMInferenceRuntime.create(DeploymentConfig(config), folder, EngineOptions(threads=1))


@pytest.fixture
def runtime(engine_folders: EngineFolders, dialect: str) -> Iterator[LLMInferenceRuntime]:
    opened = _open(engine_folders("qwen3", dialect), chunk=32)
    yield opened
    opened.close()


def _rows(*, sampled: bool = False, max_tokens: int = 12) -> list[RowRequest]:
    """Eight ragged rows; the fifth grows into a larger bucket while it decodes."""
    numbers = np.random.default_rng(7)
    return [
        RowRequest(
            token_ids=numbers.integers(3, 288, length).tolist(),
            prompt_length=length,
            options=structs.replace(
                structs.replace(SAMPLED, seed=index) if sampled else RequestOptions(),
                max_tokens=max_tokens + index,
                ignore_eos=True,
            ),
        )
        for index, length in enumerate(LENGTHS)
    ]


def _tokens(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> list[list[int]]:
    return [row.token_ids for row in runtime.handle_request(GenerationRequest(rows=rows)).rows]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_reference(
    engine_folders: EngineFolders, dialect: str, name: str
) -> None:
    runtime = LLMInferenceRuntime.open(
        engine_folders(name, dialect), RuntimeOptions(threads=1, max_batch=3)
    )
    stored = reference_logits(name)
    rows = [
        RowRequest(
            token_ids=row.token_ids[: row.prompt_length],
            prompt_length=row.prompt_length,
            options=RequestOptions(
                max_tokens=len(row.token_ids) - row.prompt_length, ignore_eos=True
            ),
        )
        for row in stored
    ]
    expected = [row.token_ids[row.prompt_length :] for row in stored]
    assert _tokens(runtime, rows) == expected
    assert _tokens(runtime, rows[::-1]) == expected[::-1]
    runtime.close()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_gives_each_row_what_it_gets_alone(
    runtime: LLMInferenceRuntime, *, sampled: bool
) -> None:
    runtime.capture(range(1, 9))
    rows = _rows(sampled=sampled)
    together = _tokens(runtime, rows)
    assert together == [_tokens(runtime, [row])[0] for row in rows]
    assert runtime.counters.fallbacks == 0
    assert runtime.counters.hits > 0


def test_chunks_of_a_prompt_give_what_the_whole_gives(
    engine_folders: EngineFolders, dialect: str
) -> None:
    folder = engine_folders("llama", dialect)
    whole, chunked = _open(folder, 512), _open(folder, 7)
    assert _tokens(whole, _rows()) == _tokens(chunked, _rows())
    assert whole.prefill_metrics.steps == 1
    # Rows that are done decode meanwhile, and a chunk is not always of all others.
    assert chunked.prefill_metrics.steps >= -(-250 // 7)
    assert chunked.prefill_metrics.tokens == sum(LENGTHS)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("steps", [3, 15])
def test_rows_that_were_put_back_continue_as_if_they_had_not(
    runtime: LLMInferenceRuntime, steps: int, *, sampled: bool
) -> None:
    rows = _rows(sampled=sampled)
    expected = _tokens(runtime, rows)
    runtime.admit(rows)
    for _ in range(steps):
        runtime.step()
    unfinished = [runtime.release(number) or [] for number in range(8)]
    again = [
        structs.replace(row, token_ids=row.token_ids + generated)
        for row, generated in zip(rows, unfinished, strict=True)
    ]
    rest = _tokens(runtime, again)
    assert [done + left for done, left in zip(unfinished, rest, strict=True)] == expected


def test_cancelling_rows_leaves_the_others_unchanged(runtime: LLMInferenceRuntime) -> None:
    rows = _rows()
    expected = _tokens(runtime, rows)
    got: list[list[int]] = [[] for _ in rows]
    runtime.admit(rows)
    while runtime.active:
        for token in runtime.step().tokens:
            got[token.row].append(token.token_id)
        for row, limit in ((2, 3), (4, 2), (0, 5)):
            if len(got[row]) >= limit:
                runtime.leave(row)
    assert [len(got[row]) for row in (2, 4, 0)] == [3, 2, 5]
    for row in (1, 3, 5, 6, 7):
        assert got[row] == expected[row]


@pytest.mark.parametrize("steps", [1, 12])
def test_a_poisoned_row_fails_alone_and_leaves_nothing_behind(
    runtime: LLMInferenceRuntime, steps: int
) -> None:
    rows = _rows()
    expected = _tokens(runtime, rows)
    victim = LENGTHS.index(250)
    got: list[list[int]] = [[] for _ in rows]
    errors = []
    runtime.admit(rows)
    for step in range(1000):
        if step == steps:
            _poison_row(runtime, len(LENGTHS) - 1)
        if not runtime.active:
            break
        for token in runtime.step().tokens:
            if token.error is None:
                got[token.row].append(token.token_id)
            else:
                errors.append((token.row, token.token_id, token.error))
    assert errors == [(victim, -1, "non_finite")]
    assert all(got[row] == expected[row] for row in range(8) if row != victim)
    assert _tokens(runtime, rows) == expected


def _poison_row(runtime: LLMInferenceRuntime, place: int) -> None:
    """Put NaN into every slot of a place, as a broken kernel would."""
    kv = runtime._runner.get_kv_cache().kv
    for tensor in kv.keys + kv.values:
        cache_view(kv, tensor, place + 1)[place] = np.nan


def test_rows_freed_at_the_end_of_a_batch_are_clean(runtime: LLMInferenceRuntime) -> None:
    rows = _rows()
    expected = _tokens(runtime, rows)
    numbers = runtime.admit(rows)
    runtime.step()
    _poison_row(runtime, 0)
    assert [token.error for token in runtime.step().tokens].count("non_finite") == 1
    for number in numbers:
        runtime.leave(number)
    assert _tokens(runtime, rows) == expected
