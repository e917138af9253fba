"""Failures of the runtime, and rows that end with numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from msgspec import structs

from hearth.actors.executor.actor import DOUBT_S, Doubts
from hearth.actors.mailbox import MailboxFull
from hearth.actors.messages import Failed
from hearth.runtime.errors import HearthError
from tests.actors.executor.harness import Harness, open_harness, rids_of
from tests.actors.executor.test_actor import row
from tests.actors.fake_runtime import FakeRuntime


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def harness(runtime: FakeRuntime) -> Iterator[Harness]:
    with open_harness(runtime) as made, structlog.testing.capture_logs():
        yield made


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RuntimeError("onnx: secret"), "executor_failed"),
        (HearthError("non_finite", "numbers went wrong"), "non_finite"),
        (MemoryError(), "out_of_memory"),
    ],
)
def test_a_failing_step_takes_the_placed_rows_and_the_offered_ones_follow(
    harness: Harness, runtime: FakeRuntime, raised: Exception, code: str
) -> None:
    def before(step: int) -> None:
        if step == 2:
            raise raised

    runtime.before_step, runtime.places = before, 2
    with structlog.testing.capture_logs() as logs:
        harness.offer(row(7), row(8), row(9))
        harness.start()
        failed = harness.hear_until("failed")
        harness.finish(9)
    assert (failed.rids, failed.code) == ([7, 8], code)
    assert "secret" not in failed.message
    assert [(line["event"], line["rids"]) for line in logs] == [("rows failed", [7, 8])]


def test_a_prefill_that_fails_harms_nobody_else(harness: Harness, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 3:
            harness.offer(row(8, first=66), row(9, 2))

    runtime.spoiled, runtime.before_step = {66}, before
    harness.offer(row(7, 10))
    harness.start()
    failed = harness.hear_until("failed")
    assert (failed.rids, failed.code) == ([8], "out_of_memory")
    harness.finish(7)
    tokens = harness.tokens()
    assert (len(tokens[7]), len(tokens[9]), 8 in tokens) == (10, 2, False)


def test_prefills_that_fail_beside_rows_that_go_on_do_not_end_the_executor(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step in (3, 5, 7, 9):
            harness.offer(row(100 + step, first=66))

    runtime.spoiled, runtime.before_step = {66}, before
    harness.offer(row(7, 20))
    harness.start()
    harness.finish(7)
    assert len(harness.failed) == 4
    assert harness.failures == []


def test_prefills_that_fail_with_nobody_beside_end_the_executor(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.spoiled, runtime.places = {66}, 1
    harness.offer(*(row(rid, first=66) for rid in range(4)))
    harness.start()
    harness.join()
    assert [message.rids for message in rest(harness)] == [[0], [1], [2]]
    (error,) = harness.failures
    assert isinstance(error, HearthError)
    assert error.code == "executor_failed"


def rest(harness: Harness) -> list[Failed]:
    while harness.hear(0.1) is not None:
        pass
    return harness.failed


def test_what_cannot_be_admitted_is_answered(harness: Harness, runtime: FakeRuntime) -> None:
    def before_admit() -> None:
        if len(runtime.begun) == 1:
            runtime.begun.append(0)
            raise MemoryError

    runtime.before_admit, runtime.places = before_admit, 1
    harness.offer(row(7), row(8), row(9))
    harness.start()
    failed = harness.hear_until("failed")
    assert (failed.rids, failed.code) == ([8], "out_of_memory")
    harness.finish(9)


def test_a_lost_device_ends_the_executor_once_its_requests_are_answered(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(_step: int) -> None:
        raise HearthError("device_lost", "cuLaunchKernel: an illegal memory access")

    runtime.before_step, runtime.places = before, 2
    harness.offer(row(7), row(8), row(9))
    harness.start()
    harness.join()
    (error,) = harness.failures
    assert isinstance(error, HearthError)
    assert error.code == "device_lost"
    # The scheduler keeps the one that had no place.
    (failed,) = rest(harness)
    assert (failed.rids, failed.code) == ([7, 8], "executor_failed")


def test_failures_in_a_row_end_the_executor(harness: Harness, runtime: FakeRuntime) -> None:
    def before(_step: int) -> None:
        raise RuntimeError("the context is poisoned")

    runtime.before_step, runtime.places = before, 1
    harness.offer(*(row(rid) for rid in (1, 2, 3, 4)))
    harness.start()
    harness.join()
    (error,) = harness.failures
    assert isinstance(error, HearthError)
    assert error.code == "executor_failed"
    assert [failed.rids for failed in rest(harness)] == [[1], [2], [3]]


def test_a_row_that_ends_well_forgives_earlier_failures(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step != 3:
            raise RuntimeError("it happens")

    runtime.before_step, runtime.places = before, 1
    harness.offer(*(row(rid, 1) for rid in range(1, 6)))
    harness.start()
    assert [failed.rids for failed in rest(harness)] == [[1], [2], [4], [5]]
    assert [rids_of(step) for step in harness.steps] == [[3]]
    assert harness.failures == []


def test_a_tokenizer_far_behind_ends_the_executor(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_message: object, _timeout_s: float) -> None:
        raise MailboxFull("inproc://tokenizer")

    monkeypatch.setattr(harness.actor._to_tokenizer, "send_blocking", full)
    harness.offer(row(1))
    harness.start()
    harness.join()
    assert isinstance(harness.failures[0], MailboxFull)


WELL, ILL = True, False


@pytest.mark.parametrize(
    ("ends", "due"),
    [
        ([], False),
        ([(1, ILL)], False),
        ([(1, ILL), (1, ILL), (1, ILL)], False),
        ([(1, ILL), (2, ILL)], True),
        ([(1, ILL), (3, WELL), (2, ILL)], False),
        ([(1, ILL), (2, ILL), (3, WELL)], False),
        ([(1, ILL), (3, WELL), (2, ILL), (1, ILL)], True),
    ],
)
def test_two_prompts_without_a_good_end_between_are_enough(
    ends: list[tuple[int, bool]], *, due: bool
) -> None:
    doubts = Doubts()
    for place, end in enumerate(ends):
        doubts.ended([end], float(place))
    assert doubts.due(float(len(ends))) == due


def test_an_engine_that_was_asked_is_not_asked_again_for_a_while() -> None:
    doubts = Doubts()
    doubts.ended([(1, ILL), (2, ILL)], 0.0)
    doubts.settled(1.0)
    doubts.ended([(1, ILL), (2, ILL)], 2.0)
    assert not doubts.due(2.0)
    doubts.ended([(1, ILL), (2, ILL)], 62.0)
    assert doubts.due(62.0)


def test_rows_that_run_on_are_not_kept_waiting_for() -> None:
    doubts = Doubts()
    doubts.ended([(1, ILL), (2, ILL)], 0.0)
    assert doubts.due(DOUBT_S)
    assert not doubts.due(DOUBT_S + 0.1)


@pytest.mark.parametrize("right", [True, False])
def test_the_known_answer_is_asked_again_and_a_wrong_one_ends_the_executor(*, right: bool) -> None:
    runtime, asked = FakeRuntime(places=1), list[int]()
    runtime.poisoned = {66, 67}

    def ask() -> None:
        asked.append(len(runtime.rows))
        if not right:
            raise HearthError("wrong_answer", "the engine does not compute its model")

    with structlog.testing.capture_logs(), open_harness(runtime, ask=ask) as harness:
        harness.offer(row(1, first=66), row(2, first=67), row(3))
        harness.start()
        if right:
            harness.finish(3)
        else:
            harness.join()
            while harness.hear(0.1) is not None:
                pass
            assert harness.placed == [[1], [2]]
    # No row runs then.
    assert asked == [0]
    assert [error.code for error in harness.failures if isinstance(error, HearthError)] == (
        [] if right else ["wrong_answer"]
    )


def test_rows_with_an_adapter_say_nothing_of_the_engine() -> None:
    runtime, asked = FakeRuntime(places=1), list[int]()
    runtime.poisoned = {66, 67}
    runtime.adapters = {"spoken": Path("spoken")}
    with (
        structlog.testing.capture_logs(),
        open_harness(runtime, ask=lambda: asked.append(1)) as harness,
    ):
        for rid, one in (row(1, first=66), row(2, first=67)):
            options = structs.replace(one.options, adapter="spoken")
            harness.offer((rid, structs.replace(one, options=options)))
        harness.offer(row(3))
        harness.start()
        harness.finish(3)
    assert asked == []
