from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from onnxruntime import InferenceSession
from structlog.testing import capture_logs

from hearth.actors.executor.rows import ExecutorRows
from hearth.actors.messages import Failed, Schedule, Shutdown, StepOutput, Unpin
from hearth.actors.supervisor_messages import ActorProgress
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest, RowRound, RowToken
from tests.actors.executor.harness import Harness, open_harness
from tests.actors.executor.test_actor import row
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.mailboxes import next_mail
from tests.references import reference_folder
from tools.hops import Call, frames_from_loop

ROW = RowRequest(token_ids=[1], prompt_length=1)
SEQS = itertools.count(1)
HEARD = 1 << 30


def prefill(*tokens: RowToken) -> StepResult:
    return StepResult("prefill", list(tokens), 0.0, 1.0)


def decode(*tokens: RowToken) -> StepResult:
    return StepResult("decode", list(tokens), 1.0, 1.1)


def placed(*rids: int) -> ExecutorRows:
    rows = ExecutorRows(3)
    join(rows, rids)
    return rows


def join(rows: ExecutorRows, rids: Sequence[int]) -> None:
    """Give these rows places, of which nothing is left to be told then."""
    rows.take_output()
    rows.update(Schedule(3, next(SEQS), HEARD, list(rids), dict.fromkeys(rids, ROW)))
    rows.place(rids)
    rows.take_output()


def told(rows: ExecutorRows, result: StepResult) -> StepOutput:
    """Output of a step."""
    rows.record(result)
    output = rows.take_output()
    assert output is not None
    return output


def test_tokens_are_told_first_ones_with_the_time_of_their_place() -> None:
    rows = placed(30, 10, 20)
    rows.record(prefill())
    assert rows.take_output() is None
    result = prefill(RowToken(20, 8), RowToken(30, 9))
    result.slot_times, result.cached = {20: 0.5, 30: 0.5}, {30: 64}
    first = told(rows, result)
    assert (first.incarnation, first.tokens, first.ended) == (3, result.tokens, 1.0)
    assert (first.slot_times, first.cached) == ({20: 0.5, 30: 0.5}, {30: 64})
    second = told(rows, decode(RowToken(20, 4)))
    assert (second.number, second.tokens) == (first.number + 1, [RowToken(20, 4)])
    assert (second.slot_times, second.cached) == ({}, {})


def test_rows_that_end_or_fail_go_on_no_more() -> None:
    rows = placed(1, 2, 3)
    ended = told(rows, decode(RowToken(1, 5, finish="stop"), RowToken(3, -1, error="non_finite")))
    assert ended.finished == [1, 3]
    assert list(rows) == [2]
    assert rows.fail([1, 2], HearthError("out_of_memory", "no room")) == [2]
    assert not len(rows)


def test_a_prefill_that_fails_takes_its_own_rows_along_and_no_other() -> None:
    rows = placed(1, 2, 3)
    result = prefill(
        RowToken(1, 7), RowToken(2, -1, error="out_of_memory"), RowToken(3, -1, error="non_finite")
    )
    assert rows.take_failed(result) == []
    result.failure = HearthError("out_of_memory", "no room")
    assert rows.take_failed(result) == [2]
    rows.fail([2], result.failure)
    assert [token.row for token in told(rows, result).tokens] == [1, 3]
    assert list(rows) == [1]


def verify(*tokens: RowToken, rounds: list[RowRound]) -> StepResult:
    return StepResult("verify", list(tokens), 1.0, 1.2, rounds)


def test_a_round_gives_a_row_several_tokens_and_ends_it_with_the_last() -> None:
    rows = placed(30, 10)
    result = verify(
        RowToken(10, 4),
        RowToken(10, 5),
        RowToken(30, 6),
        RowToken(10, 7, finish="stop"),
        rounds=[RowRound(10, 8, 3), RowRound(30, 5, 1)],
    )
    output = told(rows, result)
    assert (output.tokens, output.rounds, output.slot_times) == (result.tokens, result.rounds, {})
    assert (output.finished, list(rows)) == ([10], [30])


def test_rows_get_places_in_the_wanted_order_and_what_is_unknown_is_missed() -> None:
    rows = ExecutorRows(3)
    rows.update(Schedule(3, 5, 0, [1, 2], {1: ROW, 2: ROW}))
    rows.update(Schedule(3, 6, 0, [9, 2, 1, 8], {8: ROW}, preempted=[1], urgent=[2]))
    assert list(rows.waiting) == [2, 1, 8]
    assert rows.preempted == {1: False, 2: True}
    assert rows.take_output() == StepOutput(3, 1, 6, missing=[9])
    assert rows.take_output() is None


def test_what_is_not_wanted_and_has_no_place_is_given_up() -> None:
    rows = placed(1, 2)
    rows.update(Schedule(3, next(SEQS), HEARD, [5], {5: ROW}))
    rows.update(Schedule(3, next(SEQS), HEARD))
    assert (list(rows.waiting), list(rows)) == ([], [1, 2])


def test_a_cancelled_row_is_dropped_wherever_it_is() -> None:
    rows = placed(1, 2)
    rows.update(Schedule(3, next(SEQS), HEARD, [5], {5: ROW}))
    assert rows.update(Schedule(3, next(SEQS), HEARD, [5], cancelled=[2, 5, 77])) == [2]
    assert (list(rows.waiting), list(rows)) == ([], [1])


def test_a_row_that_has_ended_is_not_missed_until_its_end_has_been_heard() -> None:
    rows = placed(1)
    ended = told(rows, decode(RowToken(1, 5, finish="stop")))
    rows.update(Schedule(3, next(SEQS), ended.number - 1, [1], {1: ROW}))
    assert (rows.waiting, rows.take_output().missing) == ({}, [])  # type: ignore[union-attr] # told
    rows.update(Schedule(3, next(SEQS), ended.number, [1], {1: ROW}))
    assert list(rows.waiting) == [1]


def test_who_retires_gives_up_what_waits_and_takes_nothing_more() -> None:
    rows = placed(1)
    rows.update(Schedule(3, next(SEQS), HEARD, [5], {5: ROW}))
    rows.retire()
    rows.retire()
    assert rows.take_output().retiring  # type: ignore[union-attr] # told
    rows.update(Schedule(3, next(SEQS), HEARD, [6], {6: ROW}))
    assert (rows.waiting, list(rows)) == ({}, [1])


def test_failures_are_told_with_their_reason() -> None:
    rows = placed(1)
    assert rows.fail([], HearthError("out_of_memory", "no room", "capacity")) == []
    assert rows.take_output() is None
    assert rows.fail([1], HearthError("out_of_memory", "no room", "capacity")) == [1]
    output = rows.take_output()
    assert output is not None
    assert output.failed == [Failed([1], "out_of_memory", "no room", "capacity")]


@settings(max_examples=200, deadline=None)
@given(
    wanted=st.lists(st.lists(st.integers(0, 5), unique=True), min_size=1, max_size=8),
    come=st.lists(st.integers(0, 7), max_size=20),
)
def test_only_the_newest_schedule_counts_whatever_came_before(
    wanted: list[list[int]], come: list[int]
) -> None:
    """Some are lost, others come twice or late; rows that are missed are sent with the next."""
    rows, last = ExecutorRows(3), len(wanted)
    schedules = [
        Schedule(3, 1 + place, 0, rids, dict.fromkeys(rids, ROW))
        for place, rids in enumerate(wanted)
    ]
    for place in come:
        rows.update(schedules[place % last])
    rows.update(Schedule(3, last + 1, 0, wanted[-1]))
    output = rows.take_output()
    assert output is not None
    assert output.seq == last + 1
    assert [rid for rid in wanted[-1] if rid in rows.waiting] == list(rows.waiting)
    assert sorted([*rows.waiting, *output.missing]) == sorted(wanted[-1])
    rows.update(Schedule(3, last + 2, 0, wanted[-1], dict.fromkeys(output.missing, ROW)))
    assert list(rows.waiting) == wanted[-1]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def harness(runtime: FakeRuntime) -> Iterator[Harness]:
    with open_harness(runtime) as made:
        yield made


def test_what_came_from_the_prefix_cache_is_told_with_the_first_token(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.cached[5] = 64
    runtime.prefix_metrics = PrefixMetrics(queried=100, reused=64)
    harness.offer(row(7, 3), row(8, 3, first=5))
    harness.start()
    harness.finish(7, 8)
    assert [step.cached for step in harness.steps] == [{8: 64}, {}, {}]
    told = next_mail(harness.supervisor, 2)
    assert isinstance(told, ActorProgress)
    assert told.metrics
    assert told.metrics.prefix == PrefixMetrics(queried=100, reused=64)


def test_files_that_could_not_be_used_are_in_the_log(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.failures = [HearthError("spill_invalid", "a.page is damaged", "a.page")]
    with capture_logs() as logs:
        harness.start()
        next_mail(harness.supervisor, 1)
        runtime.failures = [HearthError("spill_invalid", "b.page is damaged", "b.page")]
        harness.control.post(Shutdown())
        harness.join()
    told = [(one["code"], one["reason"]) for one in logs if one["log_level"] == "warning"]
    assert told == [
        ("spill_invalid", "a.page is damaged"),
        ("spill_invalid", "b.page is damaged"),
    ]


def test_a_client_that_has_gone_keeps_nothing_in_the_prefix_cache(
    harness: Harness, runtime: FakeRuntime
) -> None:
    harness.work.post(Unpin(5))
    harness.offer(row(7, 1))
    harness.start()
    harness.finish(7)
    assert runtime.unpinned == [5]


def test_who_may_not_pin_is_refused_alone_and_however_often(
    harness: Harness, runtime: FakeRuntime
) -> None:
    pins = [structs.replace(row(rid)[1], options=RequestOptions(cache="pin")) for rid in range(4)]

    def refuse() -> None:
        if not runtime.rows:
            raise HearthError("cache_full", "too much", "cache")

    runtime.before_admit = refuse
    harness.offer(*enumerate(pins))
    harness.start()
    harness.hear_until("failed", 4)
    assert [(one.rids, one.code) for one in harness.failed] == [
        ([rid], "cache_full") for rid in range(4)
    ]
    runtime.before_admit = lambda: None
    harness.offer(row(9, 1))
    harness.finish(9)
    assert harness.failures == []


def test_a_step_is_six_frames_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    options = RuntimeOptions(speculation=SpeculationOptions(method="lookup", adaptive=False))
    runtime = LLMInferenceRuntime.open(tmp_path / "engine", options)
    runtime.capture([1])
    stacks: list[list[Call]] = []
    launch = InferenceSession.run_with_iobinding

    def note(session: InferenceSession, *given: Any) -> None:
        stacks.append(frames_from_loop(sys._getframe(1)))
        launch(session, *given)

    monkeypatch.setattr(InferenceSession, "run_with_iobinding", note)
    # Rows that say one token again and again are what a lookup continues.
    again = RequestOptions(max_tokens=4, logit_bias=((5, 100.0),))
    with open_harness(runtime) as harness:
        for number, speculation in enumerate((False, True), 1):
            asked = structs.replace(again, speculation=speculation)
            request = RowRequest(token_ids=[5] * 9, prompt_length=9, options=asked)
            harness.offer((number, request))
            if number == 1:
                harness.start()
            harness.finish(number)
    steps = ("execute_vanilla_decoding_step", "execute_eagle_base_tree_decoding_step")
    for step in steps:
        found = [stack for stack in stacks if any(call.function == step for call in stack)]
        assert found
        for stack in found:
            assert len(stack) <= 6
            assert len({call.file for call in stack}) <= 6
    runtime.close()
