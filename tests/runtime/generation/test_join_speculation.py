"""What joins cost speculation: nothing, and entries of the draft that wait are kept."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from hearth.runtime.batch import DecodingRow
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from tests.runtime.generation.schedules.home import (
    Method,
    Setting,
    export_home,
    home_chats,
    open_runtime,
)
from tests.runtime.kv_cache.arranged_rows import cache_view

pytestmark = pytest.mark.slow
TOKENS = 48
LEAST = 0.97


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_home(tmp_path_factory.mktemp("joins") / "home", 32)


def arriving(runtime: LLMInferenceRuntime, rows: Sequence[RowRequest], apart: float) -> float:
    """The accept length of rows that come at random, so many borders `apart` in the mean."""
    random, due = Random(1), 0.0
    waiting = []
    for row in rows:
        waiting.append((due, row))
        due += random.expovariate(1 / apart)
    accepted: list[int] = []
    border = 0
    while waiting or runtime.active:
        while waiting and waiting[0][0] <= border and runtime.free:
            runtime.admit([waiting.pop(0)[1]])
        if runtime.active:
            accepted += [one.accepted for one in runtime.step().rounds]
        border += 1
    return fmean(accepted)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("method", ["eagle", "lookup"])
def test_joins_cost_no_accepted_tokens(folder: Path, method: Method, *, gpu: bool) -> None:
    rows = chats(folder)[::2]
    with closing(open_runtime(folder, Setting(method, gpu=gpu))) as runtime:
        # One after the other.
        alone = arriving(runtime, rows, 10_000)
        for apart in (1, 6):
            assert arriving(runtime, rows, apart) >= LEAST * alone > LEAST


def draft_entries(runtime: LLMInferenceRuntime, number: int) -> list[np.ndarray]:
    """What the draft's cache has of a row that has a place: [kv heads, entries, head size] each."""
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    caches, rows = proposer._draft.caches, runtime._context.rows
    found = [place for place, row in enumerate(rows) if row.number == number]
    return caches.kv.capture(found[0], caches.row_lengths[found[0]]) if found else []


def check_entries(runtime: LLMInferenceRuntime, rows: Sequence[RowRequest]) -> None:
    """Compare the draft's entries of a row beside rows that come and go with those alone."""
    (number,) = runtime.admit(rows[:1])
    whole: list[np.ndarray] = []
    while runtime.active:
        runtime.step()
        whole = draft_entries(runtime, number) or whole
    others = runtime.admit(rows[1:3])
    (number,) = runtime.admit(rows[:1])
    compared, coming, ended = set[int](), list(rows[3:]), False
    while not ended:
        tokens = runtime.step().tokens
        ended = any(token.row == number and token.finish for token in tokens)
        for found, alone in zip(draft_entries(runtime, number), whole, strict=False):
            entries = found.shape[1]
            compared.add(entries)
            assert np.array_equal(found, alone[:, :entries])
        if coming and runtime.free:
            others += runtime.admit([coming.pop()])
            runtime.leave(others.pop(0))
    assert len(compared) > TOKENS // 7


def chats(folder: Path, **options: Any) -> list[RowRequest]:
    """Questions that are answered in full length."""
    asked = RequestOptions(max_tokens=TOKENS, **options)
    return [
        RowRequest(token_ids=list(chat), prompt_length=len(chat), options=asked)
        for chat in home_chats(folder)
    ]


@pytest.mark.parametrize("gpu", [False, True])
def test_a_join_loses_no_entry_of_a_running_row(folder: Path, *, gpu: bool) -> None:
    with closing(open_runtime(folder, Setting("eagle", gpu=gpu))) as runtime:
        check_entries(runtime, chats(folder, ignore_eos=True))


def test_hidden_states_that_a_join_overwrites_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = EagleProposer._save

    def overwrite(proposer: EagleProposer, row: DecodingRow, place: int) -> None:
        proposer._draft.save_hidden(proposer._prompt, [place], proposer._hidden, 0)
        save(proposer, row, place)

    monkeypatch.setattr(EagleProposer, "_save", overwrite)
    with closing(open_runtime(folder, Setting("eagle"))) as runtime, pytest.raises(AssertionError):
        check_entries(runtime, chats(folder, ignore_eos=True))


@pytest.mark.parametrize("tree", [None, (3, 2, 8)])
def test_a_row_without_a_tree_runs_none_of_its_drafts(
    folder: Path, tree: tuple[int, int, int] | None
) -> None:
    """Their numbers may be what has taken its trees away, and would be masked but there."""
    rows = [*chats(folder)[1:2], *chats(folder, speculation=False)[3:4]]
    with closing(open_runtime(folder, Setting("eagle", tree=tree))) as runtime:
        runtime.admit(rows)
        while runtime.step().kind != "verify":
            pass
        assert runtime._speculation is not None
        width, inputs = runtime._speculation._trees.ids.shape[1], runtime._runner._inputs
        embeds, table = inputs.inputs_embeds, inputs.embedding.array
        drafted, none = embeds.view((2, width, embeds.shape[-1]))[:, 1:]
        assert (drafted != table[0]).any()
        assert (none == table[0]).all()


def test_a_prompt_whose_last_chunk_has_no_entry_keeps_nothing_of_padded_steps(
    folder: Path,
) -> None:
    with closing(open_runtime(folder, Setting("eagle", gpu=True))) as runtime:
        assert runtime._speculation is not None
        proposer = runtime._speculation.proposer
        assert isinstance(proposer, EagleProposer)
        caches = proposer._draft.caches
        runtime.admit(chats(folder, ignore_eos=True)[:3])
        while runtime.step().kind != "verify" or runtime._context.joiners:
            pass
        options = RequestOptions(max_tokens=2, ignore_eos=True)
        runtime.admit([RowRequest(token_ids=[9] * 33, prompt_length=33, options=options)])
        while runtime.step().kind != "verify" or caches.row_lengths[3:] != [32]:
            pass
        for tensor in caches.kv.keys + caches.kv.values:
            cache_view(caches.kv, tensor, 4)[3, :, 32:] = np.nan
        while runtime._context.joiners:
            runtime.step()
        assert caches.row_lengths[3:] == [32]
        assert caches.finite(3)


@pytest.mark.parametrize("method", ["eagle", "lookup"])
def test_a_row_near_its_capacity_leaves_the_others_their_rounds(
    folder: Path, method: Method
) -> None:
    with closing(open_runtime(folder, Setting(method))) as runtime:
        short = chats(folder, ignore_eos=True)[1]
        tokens = (short.token_ids * runtime.capacity)[: runtime.capacity - TOKENS]
        long = RowRequest(
            token_ids=tokens,
            prompt_length=len(tokens),
            options=RequestOptions(ignore_eos=True),
        )
        (first,) = runtime.admit([long])
        while not runtime.step().tokens:
            pass
        (second,) = runtime.admit([short])
        rounds: dict[int, int] = {first: 0, second: 0}
        given, kinds = dict(rounds), set[str]()
        while runtime.active:
            result = runtime.step()
            kinds |= {result.kind} - {"prefill"}
            for one in result.rounds:
                rounds[one.row] += 1
            for token in result.tokens:
                given[token.row] += 1
        assert given == {first: TOKENS - 1, second: TOKENS}
        assert min(rounds.values()) > 1
        assert method == "lookup" or kinds == {"verify"}


def counts(runtime: LLMInferenceRuntime) -> tuple[float, ...]:
    speculation, steps = runtime.speculation_metrics, runtime.generation_metrics
    return speculation.rounds, speculation.verify_s, steps.steps, steps.seconds


def queue_ahead(runtime: LLMInferenceRuntime) -> None:
    """Step until a verify step is in flight."""
    while not any(step.kind == "verify" for step in runtime._in_flight):
        runtime.step()


def test_a_round_that_was_queued_ahead_ends_before_anything_else(folder: Path) -> None:
    rows = chats(folder, ignore_eos=True)
    with closing(open_runtime(folder, Setting("eagle", gpu=True))) as runtime:
        wanted = runtime.handle_request(GenerationRequest(rows=rows[1:3])).rows
        (number,) = runtime.admit(rows[:1])
        queue_ahead(runtime)
        runtime.leave(number)
        assert not runtime.active
        counted = counts(runtime)
        runtime._clear("look")
        # Nobody knows when it ended.
        assert counts(runtime) == counted
        found = runtime.handle_request(GenerationRequest(rows=rows[1:3])).rows
        assert [row.token_ids for row in found] == [row.token_ids for row in wanted]
        # Beside a row that goes on nothing is told of one that left meanwhile.
        first, second = runtime.admit(rows[:2])
        queue_ahead(runtime)
        runtime.leave(first)
        result = runtime.step()
        assert {token.row for token in result.tokens} == {second}
        assert {one.row for one in result.rounds} <= {second}


def test_a_round_whose_rows_have_all_left_is_not_counted_with_who_comes_next(folder: Path) -> None:
    rows = chats(folder, ignore_eos=True)
    with closing(open_runtime(folder, Setting("eagle", gpu=True))) as runtime:
        (number,) = runtime.admit(rows[:1])
        queue_ahead(runtime)
        runtime.leave(number)
        counted = counts(runtime)
        (second,) = runtime.admit(rows[1:2])
        assert runtime.step().kind == "prefill"
        assert counts(runtime) == counted
        while runtime.active:
            assert {token.row for token in runtime.step().tokens} <= {second}
