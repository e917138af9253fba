from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import pytest
import structlog
import zmq

from actors.admission import PolicySettings
from actors.mailbox import MailboxFull, Receiver, Sender
from actors.messages import (
    Accepted,
    AskReport,
    BatchEnded,
    BatchStarted,
    Cancel,
    Continuation,
    DoorMessage,
    ExecutorControl,
    ExecutorLost,
    ExecutorMessage,
    Release,
    RowsEnded,
    RowsFailed,
    RunBatch,
    SchedulerControl,
    SchedulerMessage,
    SchedulerReport,
    TokenizerMessage,
)
from actors.scheduler import SchedulerActor
from actors.scheduler_policy import SchedulerPolicy
from tests.actors.simulation import LIMITS, submit

DEFAULTS = PolicySettings()
READY = msgspec.structs.replace(LIMITS, work="inproc://work-1", control="inproc://control-1")


@dataclass
class House:
    """The neighbours of one scheduler, each end owned by the test."""

    context: Any
    submit: Sender[Any]
    control: Sender[Any]
    tokenizer: Receiver[TokenizerMessage]
    door: Receiver[DoorMessage]
    work: Receiver[ExecutorMessage]
    executor_control: Receiver[ExecutorControl]
    scheduler: SchedulerActor


@asynccontextmanager
async def house(settings: PolicySettings = DEFAULTS, limit: int = 100) -> AsyncIterator[House]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(endpoint: str) -> Sender[Any]:
        return Sender(context, endpoint, limit)

    inbox: Receiver[SchedulerMessage] = Receiver(context, ["inproc://s"], SchedulerMessage, 100)
    control: Receiver[SchedulerControl] = Receiver(context, ["inproc://c"], SchedulerControl, 100)
    made = House(
        context=context,
        submit=connect("inproc://s"),
        control=connect("inproc://c"),
        tokenizer=Receiver(context, ["inproc://t"], TokenizerMessage, limit),
        door=Receiver(context, ["inproc://d"], DoorMessage, limit),
        work=Receiver(context, [READY.work], ExecutorMessage, limit),
        executor_control=Receiver(context, [READY.control], ExecutorControl, limit),
        scheduler=SchedulerActor(
            inbox=inbox,
            control=control,
            to_tokenizer=connect("inproc://t"),
            to_door=connect("inproc://d"),
            connect=connect,
            policy=SchedulerPolicy(settings),
        ),
    )
    try:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.scheduler.run)
                yield made
                tasks.cancel_scope.cancel()
    finally:
        for mailbox in (made.submit, made.control, made.tokenizer, made.door):
            mailbox.close()
        made.work.close()
        made.executor_control.close()
        context.term()


async def test_a_request_is_accepted_and_runs() -> None:
    async with house() as made:
        made.control.post(READY)
        sent = time.monotonic()
        made.submit.post(submit(1, prompt=3))
        assert await made.door.receive() == Accepted(1, 3)
        started = await made.door.receive()
        assert isinstance(started, BatchStarted)
        assert 0.004 < started.rows[0].queued_s <= time.monotonic() - sent
        run = await made.work.receive()
        assert list(run.rows) == [1]


async def test_a_burst_shares_a_batch_and_the_rest_follows() -> None:
    async with house() as made:
        made.control.post(READY)
        for rid in range(10):
            made.submit.post(submit(rid))
        first = await made.work.receive()
        assert list(first.rows) == list(range(8))
        made.submit.post(BatchEnded(first.batch))
        second = await made.work.receive()
        assert list(second.rows) == [8, 9]


async def test_the_clock_alone_releases_a_batch_when_somebody_waits() -> None:
    async with house(PolicySettings(hold_s=0.05, fill_wait_s=0.0)) as made:
        made.control.post(READY)
        made.submit.post(submit(1))
        first = await made.work.receive()
        made.submit.post(submit(2))
        assert await made.executor_control.receive() == Release(first.batch)
        made.submit.post(BatchEnded(first.batch, [Continuation(1, [9])]))
        second = await made.work.receive()
        assert [(rid, row.token_ids[-1]) for rid, row in second.rows.items()] == [(2, 1), (1, 9)]


async def test_cancel_by_either_way_reaches_the_executor_once() -> None:
    async with house(PolicySettings(fill_wait_s=0.0)) as made:
        made.control.post(READY)
        made.submit.post(submit(1))
        await made.work.receive()
        made.control.post(Cancel(1))
        made.submit.post(Cancel(1))
        assert await made.executor_control.receive() == Cancel(1)
        made.submit.post(AskReport(5))
        while not isinstance(load := await made.door.receive(), SchedulerReport):
            pass
        assert (load.rid, load.running) == (5, 0)
        assert made.executor_control.receive_nowait() is None


async def test_rows_that_have_ended_or_failed_run_no_longer() -> None:
    async with house(PolicySettings(fill_wait_s=0.0)) as made:
        made.control.post(READY)
        for rid in (1, 2, 3):
            made.submit.post(submit(rid))
        run = await made.work.receive()
        made.submit.post(RowsEnded([1]))
        made.submit.post(RowsFailed([2], "executor_failed", "the executor failed"))
        made.submit.post(AskReport(5))
        while not isinstance(report := await made.door.receive(), SchedulerReport):
            pass
        assert report.running == 1
        made.submit.post(BatchEnded(run.batch))
        made.submit.post(submit(4))
        assert list((await made.work.receive()).rows) == [4]


async def test_refusals_go_to_the_tokenizer() -> None:
    async with house() as made:
        made.control.post(READY)
        made.submit.post(submit(1, prompt=4001))
        failed = await made.tokenizer.receive()
        assert isinstance(failed, RowsFailed)
        assert (failed.rids, failed.code) == ([1], "prompt_too_long")


async def test_loss_fails_what_ran_and_the_next_executor_takes_the_rest() -> None:
    async with house(PolicySettings(fill_wait_s=0.0)) as made:
        made.control.post(msgspec.structs.replace(READY, max_batch=1))
        made.submit.post(submit(1))
        assert list((await made.work.receive()).rows) == [1]
        made.submit.post(submit(2))
        made.control.post(ExecutorLost("killed"))
        failed = await made.tokenizer.receive()
        assert isinstance(failed, RowsFailed)
        assert (failed.rids, failed.code) == ([1], "executor_failed")
        work: Receiver[ExecutorMessage] = Receiver(
            made.context, ["inproc://work-2"], ExecutorMessage, 9
        )
        again = msgspec.structs.replace(READY, work="inproc://work-2", control="inproc://control-2")
        made.control.post(again)
        assert list((await work.receive()).rows) == [2]
        assert made.work.receive_nowait() is None
        work.close()


async def test_mail_for_an_executor_that_takes_none_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house(PolicySettings(fill_wait_s=0.0), limit=1) as made:
        made.control.post(READY)
        made.submit.post(submit(1))
        await made.work.receive()

        def full(_message: object) -> None:
            raise MailboxFull("inproc://control-1")

        control = made.scheduler._executor_control
        assert control is not None
        monkeypatch.setattr(control, "post", full)
        with structlog.testing.capture_logs() as logs:
            made.control.post(Cancel(1))
            made.submit.post(submit(2, prompt=0))
            assert isinstance(await made.tokenizer.receive(), RowsFailed)
        assert [entry["dropped"] for entry in logs] == ["Cancel"]


async def test_one_line_per_batch_at_debug() -> None:
    with structlog.testing.capture_logs() as logs:
        async with house(PolicySettings(fill_wait_s=0.0)) as made:
            made.control.post(READY)
            made.submit.post(submit(1))
            run = await made.work.receive()
            made.submit.post(BatchEnded(run.batch, [Continuation(1, [3])]))
            await made.work.receive()
    (line,) = logs
    assert (line["log_level"], line["rows"], line["put_back"]) == ("debug", 1, 1)


@pytest.mark.parametrize("message", [Release(1), RunBatch(1, {})])
async def test_without_an_executor_its_mail_goes_nowhere(message: Any) -> None:
    async with house() as made:
        await made.scheduler._carry_out(message)
        made.submit.post(AskReport(1))
        assert isinstance(await made.door.receive(), SchedulerReport)
