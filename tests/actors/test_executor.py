from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import structlog

from actors import executor as executor_module
from actors.mailbox import MailboxFull
from actors.messages import (
    ActorProgress,
    BatchEnded,
    Cancel,
    Continuation,
    ExecutorMetrics,
    Release,
    Shutdown,
    Step,
)
from runtime.decoding.metrics import StageMetrics
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.request import RequestOptions, RowRequest
from tests.actors.executor_house import House, open_house
from tests.actors.fake_runtime import FakeRuntime


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def house(runtime: FakeRuntime) -> Iterator[House]:
    with open_house(runtime) as made:
        yield made


def row(
    rid: int, tokens: int = 3, generated: Sequence[int] = (), first: int = 1
) -> tuple[int, RowRequest]:
    options = RequestOptions(max_tokens=tokens)
    return rid, RowRequest(token_ids=[first, 2, *generated], prompt_length=2, options=options)


def test_a_batch_runs_to_its_end(house: House, runtime: FakeRuntime) -> None:
    house.run(1, row(7, 2), row(8, 3))
    house.start()
    first = house.tokenizer.wait(5)
    assert isinstance(first, Step)
    assert first.rids == [7, 8]
    assert first.prefill_s is not None
    assert house.tokens() == {7: [101], 8: [101, 102]}
    assert house.batch_ended() == BatchEnded(1, [])
    assert not runtime.active


def test_the_end_of_a_batch_comes_behind_its_tokens(house: House) -> None:
    house.run(1, row(7, 2))
    house.start()
    heard = [house.hear(5) for _ in range(3)]
    assert [type(message) for message in heard] == [Step, Step, BatchEnded]


def test_a_continuation_goes_on(house: House) -> None:
    house.run(1, row(7, 5, generated=[100, 101]))
    house.start()
    assert house.tokens() == {7: [102, 103, 104]}


def test_cancel_between_steps_ends_one_row(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 3:
            house.control.post(Cancel(7))
            time.sleep(0.05)

    runtime.before_step = before
    house.run(1, row(7, 50), row(8, 6))
    house.start()
    tokens = house.tokens()
    assert len(tokens[7]) == 3
    assert len(tokens[8]) == 6
    assert house.batch_ended().unfinished == []


def test_a_cancel_that_overtakes_its_batch_is_kept(house: House, runtime: FakeRuntime) -> None:
    for rid in (7, 8):
        house.control.post(Cancel(rid))
    house.run(1, row(7))
    house.run(2, row(8), row(9))
    house.start()
    assert house.batch_ended() == BatchEnded(1, [])
    assert house.batch_ended() == BatchEnded(2, [])
    assert house.tokens() == {9: [100, 101, 102]}
    assert runtime.begun == [1]


def test_early_cancels_are_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "_EARLY_CANCELS", 3)
    for rid in (1, 2, 3, 4):
        house.control.post(Cancel(rid))
    house.run(1, row(1), row(4))
    house.start()
    assert set(house.tokens()) == {1}


def test_release_puts_rows_back_with_all_tokens(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 4:
            house.control.post(Release(1))
            time.sleep(0.05)

    runtime.before_step = before
    house.run(1, row(7, 50, generated=[100]), row(8, 2))
    house.start()
    ended = house.batch_ended()
    assert ended.unfinished == [Continuation(7, [100, 101, 102, 103, 104])]
    assert not runtime.active


def test_release_for_another_batch_is_ignored(house: House) -> None:
    house.control.post(Release(1))
    house.run(2, row(7, 20))
    house.start()
    assert len(house.tokens()[7]) == 20


def test_release_waits_until_the_prefill_is_paid(house: House, runtime: FakeRuntime) -> None:
    house.control.post(Release(1))
    runtime.before_step = lambda step: time.sleep(0.1 if step == 1 else 0.03)
    house.run(1, row(7, 50))
    house.start()
    (back,) = house.batch_ended().unfinished
    assert 4 <= len(back.generated) <= 6


def test_a_row_that_cannot_be_served_fails_alone(house: House, runtime: FakeRuntime) -> None:
    house.run(1, row(7), row(8, first=-1))
    house.start()
    failed = house.failed()
    assert (failed.rids, failed.code, failed.field) == ([8], "invalid_value", "token_ids")
    assert house.batch_ended() == BatchEnded(1, [])
    assert runtime.begun == [1]


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RuntimeError("onnx: secret"), "executor_failed"),
        (HearthError("non_finite", "numbers went wrong"), "non_finite"),
        (MemoryError(), "out_of_memory"),
    ],
)
def test_a_failing_step_ends_its_batch_only(
    house: House, runtime: FakeRuntime, raised: Exception, code: str
) -> None:
    def before(step: int) -> None:
        if step == 2:
            raise raised

    runtime.before_step = before
    with structlog.testing.capture_logs() as logs:
        house.run(1, row(7), row(8, 1))
        house.run(2, row(9))
        house.start()
        failed = house.failed()
        assert (failed.rids, failed.code) == ([7], code)
        assert "secret" not in failed.message
        assert [house.batch_ended(), house.batch_ended()] == [BatchEnded(1), BatchEnded(2)]
    assert len(house.tokens()[9]) == 3
    assert [line["event"] for line in logs] == ["a batch failed"]


def test_a_lost_device_ends_the_executor_once_its_requests_are_answered(
    house: House, runtime: FakeRuntime
) -> None:
    def before(_step: int) -> None:
        raise HearthError("device_lost", "cuLaunchKernel: an illegal memory access")

    runtime.before_step = before
    with structlog.testing.capture_logs():
        house.run(1, row(7), row(8))
        house.run(2, row(9))
        house.start()
        house.join()
    (error,) = house.failures
    assert isinstance(error, HearthError)
    assert error.code == "device_lost"
    failed = house.failed()
    assert (failed.rids, failed.code) == ([7, 8], "executor_failed")


def test_failures_in_a_row_end_the_executor(house: House, runtime: FakeRuntime) -> None:
    def before(_step: int) -> None:
        raise RuntimeError("the context is poisoned")

    runtime.before_step = before
    with structlog.testing.capture_logs():
        for number in (1, 2, 3):
            house.run(number, row(number))
        house.start()
        house.join()
    (error,) = house.failures
    assert isinstance(error, HearthError)
    assert error.code == "executor_failed"
    assert [house.failed().rids for _ in range(3)] == [[1], [2], [3]]


def test_a_batch_that_works_forgives_earlier_failures(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step != 3:
            raise RuntimeError("it happens")

    runtime.before_step = before
    with structlog.testing.capture_logs():
        for number in range(1, 6):
            house.run(number, row(number, 1))
        house.start()
        assert [house.batch_ended().batch for _ in range(5)] == [1, 2, 3, 4, 5]
    assert house.failures == []


def test_a_tokenizer_far_behind_ends_the_executor(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_message: object, _timeout_s: float) -> None:
        raise MailboxFull("inproc://tokenizer")

    monkeypatch.setattr(house.actor._to_tokenizer, "send_blocking", full)
    house.run(1, row(1))
    house.start()
    house.join()
    assert isinstance(house.failures[0], MailboxFull)


def test_shutdown_fails_what_runs_and_what_waits(house: House, runtime: FakeRuntime) -> None:
    runtime.before_step = lambda _step: time.sleep(0.01)
    house.run(1, row(7, 10_000))
    house.run(2, row(8))
    house.start()
    assert house.tokenizer.wait(5)
    house.control.post(Shutdown())
    house.join()
    first, second = house.failed(), house.failed()
    assert [first.rids, second.rids] == [[7], [8]]
    assert {first.code, second.code} == {"shutting_down"}
    assert house.failures == []


def test_progress_is_told_while_idle_and_busy(
    house: House, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "PROGRESS_S", 0.05)
    house.start()
    idle = [house.supervisor.wait(2) for _ in range(3)]
    nothing = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert idle == [ActorProgress("executor-1", 0, busy=False, metrics=nothing)] * 3
    runtime.before_step = lambda _step: time.sleep(0.01)
    runtime.generation_metrics.record(5, 0.5)
    runtime.speculation_metrics.rounds = 4
    house.run(1, row(7, 60))
    house.batch_ended()
    told = []
    while (message := house.supervisor.receive_nowait()) is not None:
        told.append(message)
    busy = [message for message in told if isinstance(message, ActorProgress) and message.busy]
    assert 3 <= len(busy) <= 14
    assert busy == sorted(busy, key=lambda message: message.steps)
    metrics = busy[-1].metrics
    assert metrics is not None
    assert (metrics.generation.tokens, metrics.speculation.rounds) == (5, 4)
