from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import numpy as np
import pytest
import structlog
import zmq

from hearth.actors.addresses import DOOR, SCHEDULER, TOKENIZER
from hearth.actors.executor.actor import ExecutorActor
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
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
    ExecutorControl,
    ExecutorLimits,
    ExecutorLost,
    ExecutorMessage,
    ExecutorReady,
    Failed,
    ImageTimes,
    Patched,
    Request,
    RunVisionEncoder,
    Schedule,
    SchedulerControl,
    SchedulerMessage,
    SchedulerReport,
    Shutdown,
    StepOutput,
    TokenizerMessage,
    Unpin,
)
from hearth.actors.scheduler.actor import SchedulerActor, open_scheduler
from hearth.actors.scheduler.encoder_scheduler import ImageArenas
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.actors.supervisor_messages import SupervisorMessage
from hearth.runtime.engine_folder import write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config, simulated_next_tokens
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from tests.actors.executor.harness import INCARNATION, open_harness
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.mailboxes import next_mail
from tests.actors.scheduler.images import arenas, submit_images
from tests.actors.scheduler.simulation import LIMITS, new_rows, output, ready, schedule_of, submit

DEFAULTS = PolicySettings()
READY = ExecutorReady(1, "inproc://work-1", LIMITS)
ONE_PLACE = msgspec.structs.replace(READY, limits=msgspec.structs.replace(LIMITS, max_batch=1))


@dataclass
class Harness:
    """The neighbours of one scheduler, each end owned by the test."""

    context: Any
    submit: Sender[Any]
    control: Sender[Any]
    tokenizer: Receiver[TokenizerMessage]
    door: Receiver[DoorMessage]
    work: Receiver[ExecutorMessage]
    scheduler: SchedulerActor


@asynccontextmanager
async def harness(
    settings: PolicySettings = DEFAULTS, limit: int = 100, images: ImageArenas | None = None
) -> AsyncIterator[Harness]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(endpoint: str) -> Sender[Any]:
        return Sender(context, endpoint, limit)

    inbox: Receiver[SchedulerMessage] = Receiver(context, ["inproc://s"], SchedulerMessage, 100)
    control: Receiver[SchedulerControl] = Receiver(context, ["inproc://c"], SchedulerControl, 100)
    made = Harness(
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


async def wanted(made: Harness) -> Schedule:
    """The next schedule."""
    message = await made.work.receive()
    assert isinstance(message, Schedule)
    return message


async def report(made: Harness) -> SchedulerReport:
    made.submit.post(AskReport(5))
    while not isinstance(found := await made.door.receive(), SchedulerReport):
        pass
    assert found.rid == 5
    return found


async def test_a_request_is_accepted_and_offered() -> None:
    async with harness() as made:
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
    async with harness() as made:
        # While there is no executor there are no pins.
        made.submit.post(ClientGone(6))
        await report(made)
        made.submit.post(READY)
        made.submit.post(ClientGone(7))
        assert await made.work.receive() == Unpin(7)


async def test_a_burst_is_offered_together_and_the_rest_ahead() -> None:
    async with harness() as made:
        made.submit.post(READY)
        for rid in range(10):
            made.submit.post(submit(rid))
        assert rids(await made.work.receive()) == list(range(8))
        made.submit.post(output(placed=list(range(8))))
        assert rids(await made.work.receive()) == [8, 9]
        load = await report(made)
        assert (load.running, load.places, load.queued) == (8, 8, 2)


async def test_in_synchronous_batches_the_rest_is_offered_behind_all_others() -> None:
    async with harness(PolicySettings(batching="synchronous")) as made:
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
    async with harness(PolicySettings(hold_s=0.05, fill_wait_ms=0.0)) as made:
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
    async with harness(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(ONE_PLACE)
        for rid in (1, 2):
            made.submit.post(submit(rid))
        first = rids(await made.work.receive())
        made.submit.post(output(placed=first))
        assert rids(await made.work.receive()) == [2]
        made.submit.post(submit(3, priority=1))
        assert (await wanted(made)).rows == [3]


async def test_cancel_by_either_way_reaches_the_executor_once() -> None:
    async with harness(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(READY)
        made.submit.post(submit(1))
        await made.work.receive()
        made.control.post(Cancel(1))
        made.submit.post(Cancel(1))
        assert (await wanted(made)).cancelled == [1]
        assert (await report(made)).running == 0
        assert made.work.receive_nowait() is None


async def test_rows_that_have_ended_or_failed_run_no_longer() -> None:
    async with harness(PolicySettings(fill_wait_ms=0.0)) as made:
        made.submit.post(READY)
        for rid in (1, 2, 3):
            made.submit.post(submit(rid))
            await made.work.receive()
        made.submit.post(output(placed=[1, 2, 3]))
        made.submit.post(output(finished=[1]))
        made.submit.post(output(failed=[Failed([2], "out_of_memory", "no room")]))
        assert (await report(made)).running == 1


async def test_refusals_go_to_the_tokenizer() -> None:
    async with harness() as made:
        made.submit.post(READY)
        made.submit.post(submit(1, prompt=4001))
        failed = await made.tokenizer.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([1], "prompt_too_long")


async def test_loss_fails_what_ran_and_the_next_executor_takes_the_rest() -> None:
    async with harness(PolicySettings(fill_wait_ms=0.0)) as made:
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
    async with harness(PolicySettings(fill_wait_ms=0.0), limit=1) as made:
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
    async with harness() as made:
        await made.scheduler._carry_out(message)
        made.submit.post(AskReport(1))
        assert isinstance(await made.door.receive(), SchedulerReport)


async def test_an_encoder_is_connected_when_it_is_ready_and_left_when_it_is_lost() -> None:
    async with harness(images=arenas()) as made:
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


CONFIG = simulated_config(max_batch=1, capacity=512, step_ms=2.0, prefill_chunk=16)
WORK, CONTROL, SUPERVISOR = "inproc://work", "inproc://control", "inproc://supervisor"


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for position in range(len(prompt) - 1, len(prompt) + count - 1):
        last, at = np.array([tokens[-1]]), np.array([position])
        tokens.append(int(simulated_next_tokens(last, at, CONFIG.vocab_size, (0,))[0]))
    return tokens[len(prompt) :]


@contextmanager
def executor_thread(context: ZmqContext, folder: Path) -> Iterator[None]:
    write_config(folder, CONFIG)
    to_supervisor: Sender[Any] = Sender(context, SUPERVISOR, 100)
    runtime = LLMInferenceRuntime.open(folder, RuntimeOptions())
    actor = ExecutorActor(
        name="executor-1",
        incarnation=1,
        inbox=Receiver(context, [WORK], ExecutorMessage, 100),
        control=Receiver(context, [CONTROL], ExecutorControl, 100),
        to_tokenizer=Sender(context, TOKENIZER, 1000),
        to_supervisor=to_supervisor,
        runtime=runtime,
    )
    control: Sender[Any] = Sender(context, CONTROL, 10)
    thread = threading.Thread(target=actor.run)
    thread.start()
    yield
    control.post(Shutdown())
    thread.join(10)
    assert not thread.is_alive()
    runtime.close()
    control.close()
    to_supervisor.close()


@pytest.mark.parametrize("batching", ["joining", "synchronous"])
async def test_rows_that_take_turns_get_the_tokens_that_they_would_get_alone(
    tmp_path: Path, batching: Literal["joining", "synchronous"]
) -> None:
    context: ZmqContext = zmq.Context()
    settings = PolicySettings(batching=batching, hold_s=0.05, fill_wait_ms=0.0)
    scheduler = open_scheduler(context, settings)
    tokenizer: Receiver[TokenizerMessage] = Receiver(context, [TOKENIZER], TokenizerMessage, 1000)
    door: Receiver[DoorMessage] = Receiver(context, [DOOR], DoorMessage, 100)
    supervisor: Receiver[SupervisorMessage] = Receiver(
        context, [SUPERVISOR], SupervisorMessage, 100
    )
    submit: Sender[Any] = Sender(context, SCHEDULER, 100)
    prompts = {rid: [rid + 3] * (10 * rid + 1) for rid in range(3)}
    got: dict[int, list[int]] = {rid: [] for rid in prompts}
    open_rids = set(prompts)
    with executor_thread(context, tmp_path), anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run)
            submit.post(ExecutorReady(1, WORK, ExecutorLimits(1, 511, 512)))
            for rid, prompt in prompts.items():
                options = RequestOptions(max_tokens=120, ignore_eos=True)
                submit.post(Request(rid, options, token_ids=prompt))
            while open_rids:
                message = await tokenizer.receive()
                assert isinstance(message, StepOutput)
                if (told := message.without_tokens()) is not None:
                    submit.post(told)
                for token in message.tokens:
                    got[token.row].append(token.token_id)
                    if token.finish is not None:
                        open_rids.remove(token.row)
            submit.post(AskReport(1))
            loads: list[SchedulerReport] = []
            while not loads:
                answer = await door.receive()
                loads = [answer] if isinstance(answer, SchedulerReport) else []
            tasks.cancel_scope.cancel()
    assert got == {rid: expected(prompt, 120) for rid, prompt in prompts.items()}
    assert loads[0].requeued >= 6
    for mailbox in (tokenizer, door, supervisor, submit):
        mailbox.close()
    context.term()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (TokenizerMessage, ["step_output", 1, 1, 1, [[5]], 1.0]),
        (SchedulerMessage, ["submit", [1, {}, 0, float("nan")], [1]]),
        (SchedulerMessage, ["executor_ready", 1, "w", [0, 50, 100]]),
        (SchedulerMessage, ["executor_ready", 1, "w", [1 << 40, 50, 100]]),
    ],
)
def test_what_would_end_an_actor_is_not_decoded(
    context: zmq.Context[zmq.Socket[bytes]], kind: object, data: list[object]
) -> None:
    with (
        Receiver[object](context, ["inproc://a"], kind, 10) as receiver,
        Sender[object](context, "inproc://a", 10) as sender,
    ):
        sender.post(data)
        sender.post(Cancel(9))
        assert next_mail(receiver, 5) == Cancel(9)
        assert receiver.undecodable == 1


def test_of_two_requests_with_one_number_the_first_gets_the_answers() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0))
    policy.executor_ready(ready(LIMITS), 0.0)
    assert policy.submit(submit(1, prompt=3), 0.0) == [Accepted(1, 3)]
    assert policy.submit(submit(1, prompt=4), 0.0) == []
    wanted = schedule_of(policy.tick(1.0))
    assert [len(row.token_ids) for row in wanted.new.values()] == [3]
    assert policy.submit(submit(1, prompt=5), 1.0) == [], "it is held"
    assert policy.tick(1.5) == []


def test_what_comes_once_an_executor_is_asked_to_end_waits_for_the_next() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0))
    policy.executor_ready(ready(LIMITS), 0.0)
    policy.executor_retires()
    policy.submit(submit(1), 0.0)
    assert policy.tick(1.0) == []
    policy.executor_ready(ready(LIMITS, 2), 2.0)
    assert new_rows(policy.tick(3.0)) == [1]


def test_a_schedule_that_comes_twice_or_late_changes_nothing() -> None:
    options = RequestOptions(max_tokens=2)
    row = RowRequest(token_ids=[1, 2], prompt_length=2, options=options)
    with open_harness(FakeRuntime()) as made:
        made.offer((7, row), (7, row))
        made.offer((7, row), (8, row))
        for seq in (1, 2):
            made.work.post(Schedule(INCARNATION, seq, 0, [9], {9: row}))
        made.work.post(Schedule(INCARNATION + 1, 9, 0, [9], {9: row}))
        made.start()
        made.finish(7, 8)
        assert made.placed == [[7, 8]]
        assert made.tokens() == {7: [100, 101], 8: [100, 101]}


@pytest.mark.parametrize("endpoint", ["", "nowhere", "ipc", "carrier://pigeon"])
def test_an_address_that_is_none_is_refused_by_name(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    with pytest.raises(HearthError, match="is no address of a mailbox") as caught:
        Sender(context, endpoint, 1)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "endpoint")


async def test_requests_wait_for_an_executor_that_can_be_reached() -> None:
    async with harness() as made:
        made.submit.post(ExecutorReady(1, "nowhere", ExecutorLimits(8, 50, 100)))
        made.submit.post(READY)
        made.submit.post(Request(1, token_ids=[1, 2]))
        assert await made.door.receive() == Accepted(1, 2)
        assert rids(await made.work.receive()) == [1]
