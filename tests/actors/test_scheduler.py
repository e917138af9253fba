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

from hearth.actors.mailbox import MailboxFull, Receiver, Sender
from hearth.actors.messages import (
    Accepted,
    AskReport,
    Cancel,
    ClientGone,
    DoorMessage,
    DropWork,
    Encode,
    Encoded,
    EncoderLost,
    EncoderMessage,
    EncoderReady,
    ExecutorLost,
    ExecutorMessage,
    ExecutorReady,
    Failed,
    ImageTimes,
    Patched,
    RunVisionEncoder,
    Schedule,
    SchedulerControl,
    SchedulerMessage,
    SchedulerReport,
    TokenizerMessage,
    Unpin,
)
from hearth.actors.scheduler.actor import SchedulerActor
from hearth.actors.scheduler.encoder_scheduler import ImageArenas
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.image_requests import arenas, submit_images
from tests.actors.simulation import LIMITS, output, submit

DEFAULTS = PolicySettings()
READY = ExecutorReady(1, "inproc://work-1", LIMITS)
ONE_PLACE = msgspec.structs.replace(READY, limits=msgspec.structs.replace(LIMITS, max_batch=1))


@dataclass
class House:
    """The neighbours of one scheduler, each end owned by the test."""

    context: Any
    submit: Sender[Any]
    control: Sender[Any]
    tokenizer: Receiver[TokenizerMessage]
    door: Receiver[DoorMessage]
    work: Receiver[ExecutorMessage]
    scheduler: SchedulerActor


@asynccontextmanager
async def house(
    settings: PolicySettings = DEFAULTS, limit: int = 100, images: ImageArenas | None = None
) -> AsyncIterator[House]:
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
        scheduler=SchedulerActor(
            inbox=inbox,
            control=control,
            to_tokenizer=connect("inproc://t"),
            to_door=connect("inproc://d"),
            connect=connect,
            policy=SchedulerPolicy(settings, images),
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
        context.term()


def rids(message: ExecutorMessage) -> list[int]:
    """The requests that the executor is sent."""
    assert isinstance(message, Schedule)
    return list(message.new)


async def wanted(made: House) -> Schedule:
    """The next schedule."""
    message = await made.work.receive()
    assert isinstance(message, Schedule)
    return message


async def report(made: House) -> SchedulerReport:
    made.submit.post(AskReport(5))
    while not isinstance(found := await made.door.receive(), SchedulerReport):
        pass
    assert found.rid == 5
    return found


async def test_a_request_is_accepted_and_offered() -> None:
    async with house() as made:
        made.submit.post(READY)
        sent = time.monotonic()
        made.submit.post(submit(1, prompt=3))
        assert await made.door.receive() == Accepted(1, 3)
        wanted = await made.work.receive()
        assert time.monotonic() - sent > 0.004
        assert isinstance(wanted, Schedule)
        assert wanted.rows == [1]
        assert wanted.new[1].token_ids == [1, 1, 1]


async def test_the_executor_forgets_the_pins_of_a_client_that_has_gone() -> None:
    async with house() as made:
        # While there is no executor there are no pins.
        made.submit.post(ClientGone(6))
        await report(made)
        made.submit.post(READY)
        made.submit.post(ClientGone(7))
        assert await made.work.receive() == Unpin(7)


async def test_a_burst_is_offered_together_and_the_rest_ahead() -> None:
    async with house() as made:
        made.submit.post(READY)
        for rid in range(10):
            made.submit.post(submit(rid))
        assert rids(await made.work.receive()) == list(range(8))
        made.submit.post(output(placed=list(range(8))))
        assert rids(await made.work.receive()) == [8, 9]
        load = await report(made)
        assert (load.running, load.places, load.queued) == (8, 8, 2)


async def test_in_synchronous_batches_the_rest_is_offered_behind_all_others() -> None:
    async with house(PolicySettings(batching="synchronous")) as made:
        made.submit.post(READY)
        for rid in range(10):
            made.submit.post(submit(rid))
        first = rids(await made.work.receive())
        made.submit.post(output(placed=first))
        made.submit.post(output(finished=first[1:]))
        assert (await report(made)).running == 1
        assert made.work.receive_nowait() is None
        made.submit.post(output(finished=first[:1]))
        assert rids(await made.work.receive()) == [8, 9]


async def test_the_clock_alone_releases_a_row_when_somebody_waits() -> None:
    async with house(PolicySettings(hold_s=0.05, fill_wait_ms=0.0)) as made:
        made.submit.post(ONE_PLACE)
        made.submit.post(submit(1))
        await made.work.receive()
        made.submit.post(output(placed=[1]))
        made.submit.post(submit(2))
        assert rids(await made.work.receive()) == [2]
        assert (await wanted(made)).preempted == [1]
        made.submit.post(output(preempted={1: [9]}))
        made.submit.post(output(placed=[2]))
        assert (await wanted(made)).new[1].token_ids[-1] == 9


async def test_who_is_higher_is_offered_and_the_last_one_revoked() -> None:
    async with house(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(ONE_PLACE)
        for rid in (1, 2):
            made.submit.post(submit(rid))
        first = rids(await made.work.receive())
        made.submit.post(output(placed=first))
        assert rids(await made.work.receive()) == [2]
        made.submit.post(submit(3, priority=1))
        assert (await wanted(made)).rows == [3]


async def test_cancel_by_either_way_reaches_the_executor_once() -> None:
    async with house(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(READY)
        made.submit.post(submit(1))
        await made.work.receive()
        made.control.post(Cancel(1))
        made.submit.post(Cancel(1))
        assert (await wanted(made)).cancelled == [1]
        assert (await report(made)).running == 0
        assert made.work.receive_nowait() is None


async def test_rows_that_have_ended_or_failed_run_no_longer() -> None:
    async with house(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(READY)
        for rid in (1, 2, 3):
            made.submit.post(submit(rid))
            await made.work.receive()
        made.submit.post(output(placed=[1, 2, 3]))
        made.submit.post(output(finished=[1]))
        made.submit.post(output(failed=[Failed([2], "out_of_memory", "no room")]))
        assert (await report(made)).running == 1


async def test_refusals_go_to_the_tokenizer() -> None:
    async with house() as made:
        made.submit.post(READY)
        made.submit.post(submit(1, prompt=4001))
        failed = await made.tokenizer.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([1], "prompt_too_long")


async def test_loss_fails_what_ran_and_the_next_executor_takes_the_rest() -> None:
    async with house(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(ONE_PLACE)
        made.submit.post(submit(1))
        assert rids(await made.work.receive()) == [1]
        made.submit.post(output(placed=[1]))
        made.submit.post(submit(2))
        assert rids(await made.work.receive()) == [2]
        made.submit.post(ExecutorLost("killed"))
        failed = await made.tokenizer.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([1], "executor_failed")
        work: Receiver[ExecutorMessage] = Receiver(
            made.context, ["inproc://work-2"], ExecutorMessage, 9
        )
        made.submit.post(msgspec.structs.replace(READY, incarnation=2, work="inproc://work-2"))
        assert rids(await work.receive()) == [2]
        assert made.work.receive_nowait() is None
        work.close()


async def test_mail_for_an_executor_that_takes_none_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house(PolicySettings(fill_wait_ms=0.0), limit=1) as made:
        made.submit.post(READY)
        made.submit.post(submit(1))
        await made.work.receive()

        def full(_message: object) -> None:
            raise MailboxFull(READY.work)

        executor = made.scheduler._executor
        assert executor is not None
        monkeypatch.setattr(executor, "post", full)
        with structlog.testing.capture_logs() as logs:
            made.control.post(Cancel(1))
            made.submit.post(submit(2, prompt=0))
            assert isinstance(await made.tokenizer.receive(), Failed)
        assert [entry["dropped"] for entry in logs] == ["Schedule"]


@pytest.mark.parametrize("message", [Unpin(1), Schedule(1, 1, 0)])
async def test_without_an_executor_its_mail_goes_nowhere(message: Any) -> None:
    async with house() as made:
        await made.scheduler._carry_out(message)
        made.submit.post(AskReport(1))
        assert isinstance(await made.door.receive(), SchedulerReport)


async def test_an_encoder_is_connected_when_it_is_ready_and_left_when_it_is_lost() -> None:
    async with house(images=arenas()) as made:
        kind = EncoderMessage
        first: Receiver[EncoderMessage] = Receiver(made.context, ["inproc://e1"], kind, 10)
        second: Receiver[EncoderMessage] = Receiver(made.context, ["inproc://e2"], kind, 10)
        with first, second:
            made.submit.post(READY)
            made.control.post(EncoderReady("inproc://e1"))
            made.submit.post(submit_images(1, "cat"))
            work = await first.receive()
            assert isinstance(work, Encode)
            made.submit.post(Patched(work.number, ImageTimes()))
            run = await made.work.receive()
            assert isinstance(run, RunVisionEncoder)
            made.submit.post(output(images=[Encoded(run.number, ImageTimes(engine_s=0.5))]))
            assert rids(await made.work.receive()) == [1]
            made.submit.post(submit_images(2, "dog"))
            await first.receive()
            made.control.post(EncoderLost("killed"))
            failed = await made.tokenizer.receive()
            assert isinstance(failed, Failed)
            assert (failed.rids, failed.code) == ([2], "encoder_failed")
            made.submit.post(submit_images(3, "dog"))
            made.control.post(EncoderReady("inproc://e2"))
            assert isinstance(await second.receive(), Encode)
            made.control.post(Cancel(3))
            assert isinstance(await second.receive(), DropWork)
