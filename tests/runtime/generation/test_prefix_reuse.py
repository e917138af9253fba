"""What prompts and replies before have left is not computed again, and changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RowRequest
from tests.references import reference_folder
from tests.runtime.generation.prefix_rows import (
    EXACT_INT4,
    TOKENS,
    check_equal,
    computed,
    needs_native,
    open_pages,
    prompt,
    row,
    run,
)

pytestmark = needs_native
SHARED = prompt(75)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Gives an engine folder: native, classic, or native with int4 weights."""

    @cache
    def made(name: str) -> Path:
        target = tmp_path_factory.mktemp("prefix") / name
        options = ExportOptions(
            dialect="classic" if name == "classic" else "native",
            quantization="int4" if name == "int4" else "none",
            head_quantization="body",
            prefill_chunk=32,
        )
        export_model(reference_folder("qwen3"), target, options)
        return target

    return made


@pytest.fixture
def runtime(folders: Folders) -> Iterator[LLMInferenceRuntime]:
    with closing(open_pages(folders("native"))) as opened:
        yield opened


@pytest.mark.parametrize("engine", ["native", EXACT_INT4, "classic"])
def test_a_second_prompt_that_begins_alike_is_computed_from_its_end_only(
    folders: Folders, engine: str
) -> None:
    with closing(open_pages(folders(engine))) as runtime:
        run(runtime, row(SHARED + prompt(9, 1)))
        assert computed(runtime) == 84
        second = SHARED + prompt(5, 2)
        found = run(runtime, row(second))
        assert computed(runtime) == 5
        assert found.cached == {0: 75}
        wanted = run(runtime, row(second, cache="bypass"))
        assert wanted.cached == {}
        assert computed(runtime) == 80
        # To the last bit, whichever chunks the keys and values come from.
        check_equal(found.tokens[0], wanted.tokens[0], exact=engine != "classic")
        assert runtime.prefill_metrics.reused == 75


@pytest.mark.parametrize("engine", ["native", EXACT_INT4])
def test_a_chat_pays_for_each_token_once(folders: Folders, engine: str) -> None:
    with closing(open_pages(folders(engine))) as runtime:
        text: list[int] = []
        for turn in range(6):
            text += prompt(11 + turn, turn)
            found = run(runtime, row(text))
            # All but the last token of the reply was computed by the steps that picked the next.
            assert computed(runtime) == 11 + turn + bool(turn)
            wanted = run(runtime, row(text, cache="bypass"))
            computed(runtime)
            check_equal(found.tokens[0], wanted.tokens[0], exact=True)
            text += found.reply()


def test_rows_share_what_is_kept_of_their_own_salt(runtime: LLMInferenceRuntime) -> None:
    text, salts = SHARED + prompt(5, 2), ("", "ours", "theirs")
    found = {salt: [run(runtime, row(text, cache_salt=salt)) for _ in range(2)] for salt in salts}
    for first, second in found.values():
        assert (first.cached, second.cached) == ({}, {0: len(text) - 1})
        check_equal(second.tokens[0], found[""][0].tokens[0], exact=True)


def test_the_last_token_of_a_prompt_is_always_computed(runtime: LLMInferenceRuntime) -> None:
    for length in (1, 31, 32, 33, 64, 75):
        runs = [run(runtime, row(SHARED[:length])) for _ in range(2)]
        wanted = run(runtime, row(SHARED[:length], cache="bypass"))
        assert runs[1].cached == ({0: length - 1} if length > 1 else {})
        for found in runs:
            check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def test_rows_of_one_chunk_start_at_different_slots(runtime: LLMInferenceRuntime) -> None:
    run(runtime, row(SHARED))
    run(runtime, row(prompt(40, 3)))
    rows = [
        row([*SHARED, 4, 5]),
        row([*prompt(40, 3), 7, 8]),
        row(prompt(6, 5)),
        row([*SHARED[:50], 9]),
    ]
    steps = runtime.prefill_metrics.steps
    found = run(runtime, *rows)
    assert found.cached == {0: 75, 1: 40, 3: 50}
    assert runtime.prefill_metrics.steps == steps + 1
    for number, one in enumerate(rows):
        (wanted,) = run(runtime, bypassing(one)).tokens.values()
        check_equal(found.tokens[number], wanted, exact=True)


@pytest.mark.parametrize("after", [1, 3])
def test_a_row_that_joins_others_comes_with_its_prefix(
    runtime: LLMInferenceRuntime, after: int
) -> None:
    run(runtime, row(SHARED))
    # A long prefix makes the bucket grow where rows that decode lie.
    run(runtime, row(prompt(300, 8)))
    rows = [row(prompt(7, 4)), row([*SHARED, 6]), row([*prompt(300, 8), 6])]
    found = run(runtime, *rows, after=after)
    assert found.cached == {1: 75, 2: 300}
    for number, one in enumerate(rows):
        (wanted,) = run(runtime, bypassing(one)).tokens.values()
        check_equal(found.tokens[number], wanted, exact=True)


def test_a_row_that_was_put_back_goes_on_from_its_pages(runtime: LLMInferenceRuntime) -> None:
    request = row(SHARED)
    wanted = run(runtime, bypassing(request)).tokens[0]
    computed(runtime)
    (number,) = runtime.admit([request])
    tokens = [token for _ in range(3 + 4) for token in runtime.step().tokens]
    known = runtime.release(number)
    assert known == [token.token_id for token in tokens]
    assert computed(runtime) == 75
    again = RowRequest(token_ids=SHARED + known, prompt_length=len(SHARED), options=request.options)
    found = run(runtime, again)
    assert computed(runtime) == 1
    check_equal(tokens + found.tokens[0], wanted, exact=True)


def test_a_row_that_is_cancelled_leaves_what_it_has(runtime: LLMInferenceRuntime) -> None:
    (number,) = runtime.admit([row(SHARED)])
    runtime.step()
    runtime.leave(number)
    assert run(runtime, row(SHARED)).cached == {0: 32}


def test_who_bypasses_leaves_nothing(runtime: LLMInferenceRuntime) -> None:
    run(runtime, row(SHARED, cache="bypass"))
    assert run(runtime, row(SHARED)).cached == {}
    metrics = runtime.prefix_metrics
    assert metrics is not None
    assert (metrics.rows, metrics.hits, metrics.queried) == (1, 0, 75)


def test_texts_are_the_same_where_pages_have_to_go(folders: Folders) -> None:
    prompts = [prompt(40 + number, number) for number in range(4)]
    with closing(open_pages(folders("native"), pages=4)) as runtime:
        wanted = [run(runtime, row(one, cache="bypass")).tokens[0] for one in prompts]
        random = np.random.default_rng(2)
        for number in random.integers(0, 4, 12).tolist():
            found = run(runtime, row(prompts[number]))
            check_equal(found.tokens[0], wanted[number], exact=True)
        metrics = runtime.prefix_metrics
        assert metrics is not None
        assert 0 < metrics.hits < 12
        assert metrics.evicted > 0
        assert metrics.bytes["device"] <= 4 * runtime.memory["prefix_cache"] // 4


def test_what_is_pinned_stays_until_its_client_goes(folders: Folders) -> None:
    pinned = row(SHARED[:64], cache="pin", max_tokens=1)
    pinned.client = 7
    with closing(open_pages(folders("native"), pages=8)) as runtime:
        run(runtime, pinned)
        for number in range(6):
            run(runtime, row(prompt(60, 10 + number)))
        assert run(runtime, row([*SHARED[:64], 5])).cached == {0: 64}
        with pytest.raises(HearthError) as caught:
            runtime.admit([row(prompt(96), cache="pin", max_tokens=1)])
        assert (caught.value.code, caught.value.field) == ("cache_full", "cache")
        assert not runtime.active
        runtime.unpin(7)
        for number in range(6):
            run(runtime, row(prompt(60, 20 + number)))
        assert run(runtime, row([*SHARED[:64], 5])).cached == {}


def bypassing(request: RowRequest) -> RowRequest:
    """The same row without the prefix cache."""
    return row(request.token_ids, cache="bypass", max_tokens=TOKENS)


def test_without_a_cache_nothing_is_pinned(folders: Folders) -> None:
    with closing(LLMInferenceRuntime.open(folders("native"))) as runtime:
        assert runtime.prefix_metrics is None
        assert run(runtime, row(SHARED)).cached == run(runtime, row(SHARED)).cached == {}
        with pytest.raises(HearthError) as caught:
            runtime.admit([row(SHARED, cache="pin")])
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "cache")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_page_that_spoils_a_row_is_forgotten(
    runtime: LLMInferenceRuntime, tokens: int, ahead: int
) -> None:
    wanted = run(runtime, row(SHARED))
    # With a step ahead a row leaves its place before its last token is known.
    runtime._device.steps_ahead = ahead  # type: ignore[misc] # of the CPU's device
    assert runtime._prefix is not None
    (base,) = runtime._prefix._pool._tensors["device"]
    base.array[:, 2] = np.nan
    spoiled = run(runtime, row(SHARED, max_tokens=tokens)).tokens[0]
    assert [token.error for token in spoiled] == ["non_finite"]
    found = run(runtime, row(SHARED))
    assert found.cached == {}
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def test_a_load_that_fails_loses_the_rows_and_nothing_else(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(runtime, row(SHARED))
    with monkeypatch.context() as patch:
        patch.setattr("hearth.runtime.device.cpu.ops.CpuCacheStorage.load", broken)
        runtime.admit([row(SHARED)])
        with pytest.raises(HearthError, match="the copy failed"):
            runtime.step()
    found = run(runtime, row(SHARED))
    assert found.cached == {0: 74}
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def test_a_page_that_could_not_be_saved_is_not_there(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hearth.runtime.device.cpu.ops.CpuCacheStorage.save", broken)
        runtime.admit([row(SHARED)])
        assert runtime.step().failure is not None
    found = run(runtime, row(SHARED))
    assert found.cached == {}
    wanted = run(runtime, row(SHARED, cache="bypass"))
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def broken(*_: object) -> None:
    raise HearthError("executor_failed", "the copy failed")


def test_of_a_chunk_that_nobody_has_looked_at_no_page_is_kept(
    runtime: LLMInferenceRuntime,
) -> None:
    runtime._device.steps_ahead = 1  # type: ignore[misc] # of the CPU's device
    assert runtime._prefix is not None
    (pool,) = runtime._prefix._pool._tensors["device"]
    number, _ = runtime.admit([row(SHARED), row(prompt(90, 4))])
    runtime.step()
    # A second chunk of both is queued. The numbers of one of them are not finite, which nobody
    # learns as it leaves; the other goes on.
    pool.array[2] = np.nan
    runtime.leave(number)
    while runtime.active:
        runtime.step()
    found = run(runtime, row(SHARED))
    assert found.cached == {0: 32}
    wanted = run(runtime, row(SHARED, cache="bypass"))
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)
