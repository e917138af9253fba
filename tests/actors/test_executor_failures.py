"""What the executor does where its runtime fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from hearth.actors.mailbox import MailboxFull
from hearth.actors.messages import Failed
from hearth.runtime.errors import HearthError
from tests.actors.executor_house import House, open_house
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.test_executor import row


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def house(runtime: FakeRuntime) -> Iterator[House]:
    with open_house(runtime) as made, structlog.testing.capture_logs():
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
    house: House, runtime: FakeRuntime, raised: Exception, code: str
) -> None:
    def before(step: int) -> None:
        if step == 2:
            raise raised

    runtime.before_step, runtime.places = before, 2
    with structlog.testing.capture_logs() as logs:
        house.offer(row(7), row(8), row(9))
        house.start()
        failed = house.hear_until("failed")
        house.finish(9)
    assert (failed.rids, failed.code) == ([7, 8], code)
    assert "secret" not in failed.message
    assert [(line["event"], line["rids"]) for line in logs] == [("rows failed", [7, 8])]


def test_a_prefill_that_fails_harms_nobody_else(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 3:
            house.offer(row(8, first=66), row(9, 2))

    runtime.spoiled, runtime.before_step = {66}, before
    house.offer(row(7, 10))
    house.start()
    failed = house.hear_until("failed")
    assert (failed.rids, failed.code) == ([8], "out_of_memory")
    house.finish(7)
    tokens = house.tokens()
    assert (len(tokens[7]), len(tokens[9]), 8 in tokens) == (10, 2, False)


def test_prefills_that_fail_beside_rows_that_go_on_do_not_end_the_executor(
    house: House, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step in (3, 5, 7, 9):
            house.offer(row(100 + step, first=66))

    runtime.spoiled, runtime.before_step = {66}, before
    house.offer(row(7, 20))
    house.start()
    house.finish(7)
    assert len(house.failed) == 4
    assert house.failures == []


def test_prefills_that_fail_with_nobody_beside_end_the_executor(
    house: House, runtime: FakeRuntime
) -> None:
    runtime.spoiled, runtime.places = {66}, 1
    house.offer(*(row(rid, first=66) for rid in range(4)))
    house.start()
    house.join()
    assert [message.rids for message in rest(house)] == [[0], [1], [2]]
    (error,) = house.failures
    assert isinstance(error, HearthError)
    assert error.code == "executor_failed"


def rest(house: House) -> list[Failed]:
    while house.hear(0.1) is not None:
        pass
    return house.failed


def test_what_cannot_be_admitted_is_answered(house: House, runtime: FakeRuntime) -> None:
    def before_admit() -> None:
        if len(runtime.begun) == 1:
            runtime.begun.append(0)
            raise MemoryError

    runtime.before_admit, runtime.places = before_admit, 1
    house.offer(row(7), row(8), row(9))
    house.start()
    failed = house.hear_until("failed")
    assert (failed.rids, failed.code) == ([8], "out_of_memory")
    house.finish(9)


def test_a_lost_device_ends_the_executor_once_its_requests_are_answered(
    house: House, runtime: FakeRuntime
) -> None:
    def before(_step: int) -> None:
        raise HearthError("device_lost", "cuLaunchKernel: an illegal memory access")

    runtime.before_step, runtime.places = before, 2
    house.offer(row(7), row(8), row(9))
    house.start()
    house.join()
    (error,) = house.failures
    assert isinstance(error, HearthError)
    assert error.code == "device_lost"
    # The scheduler keeps the one that had no place.
    (failed,) = rest(house)
    assert (failed.rids, failed.code) == ([7, 8], "executor_failed")


def test_failures_in_a_row_end_the_executor(house: House, runtime: FakeRuntime) -> None:
    def before(_step: int) -> None:
        raise RuntimeError("the context is poisoned")

    runtime.before_step, runtime.places = before, 1
    house.offer(*(row(rid) for rid in (1, 2, 3, 4)))
    house.start()
    house.join()
    (error,) = house.failures
    assert isinstance(error, HearthError)
    assert error.code == "executor_failed"
    assert [failed.rids for failed in rest(house)] == [[1], [2], [3]]


def test_a_row_that_ends_well_forgives_earlier_failures(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step != 3:
            raise RuntimeError("it happens")

    runtime.before_step, runtime.places = before, 1
    house.offer(*(row(rid, 1) for rid in range(1, 6)))
    house.start()
    assert [failed.rids for failed in rest(house)] == [[1], [2], [4], [5]]
    assert [step.rids for step in house.steps] == [[3]]
    assert house.failures == []


def test_a_tokenizer_far_behind_ends_the_executor(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_message: object, _timeout_s: float) -> None:
        raise MailboxFull("inproc://tokenizer")

    monkeypatch.setattr(house.actor._to_tokenizer, "send_blocking", full)
    house.offer(row(1))
    house.start()
    house.join()
    assert isinstance(house.failures[0], MailboxFull)
