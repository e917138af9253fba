from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
import structlog
import zmq

from actors.load_scheduler import make_scheduler
from actors.mailbox import Receiver, Sender
from actors.messages import (
    Accepted,
    BatchEnded,
    DoorMessage,
    ExecutorMetrics,
    Request,
    RowsFailed,
    SchedulerControl,
    SchedulerMessage,
    Step,
    Submit,
    SupervisorMessage,
    TokenizerMessage,
)
from daemon import wiring
from daemon.configuration.settings import Settings
from daemon.supervision.restart_policy import Deadlines
from daemon.supervision.supervisor import StopTimes, Supervisor
from runtime.engine_folder import write_config
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config
from runtime.request import RequestOptions

DEADLINES = Deadlines(hello_s=20, load_s=20, progress_s=20, pause_s=0.05)
SETTINGS = Settings(engine_kind="simulated", step_ms=5.0, fill_wait_ms=1.0)
SIMULATED = simulated_config(max_batch=8, capacity=2048)


class House:
    """A supervisor and a scheduler that work; tokenizer and front door are the test."""

    def __init__(self, folder: Path, settings: Settings, deadlines: Deadlines) -> None:
        engine = folder / "engine"
        if not engine.exists():
            engine.mkdir()
            write_config(engine, SIMULATED)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.book = book = wiring.address_book(settings, folder)
        here = book.seen_from("daemon")
        self.tokenizer: Receiver[TokenizerMessage] = Receiver(
            self.context, book.endpoints("tokenizer"), TokenizerMessage, 4096
        )
        self.door: Receiver[DoorMessage] = Receiver(
            self.context, book.endpoints("door"), DoorMessage, 4096
        )
        inbox: Receiver[SupervisorMessage] = Receiver(
            self.context, book.endpoints("supervisor"), SupervisorMessage, 4096
        )
        to_control: Sender[SchedulerControl] = Sender(self.context, here.scheduler_control, 100)
        self.to_scheduler: Sender[SchedulerMessage] = Sender(self.context, here.scheduler, 100)
        self.scheduler = (
            make_scheduler(wiring.scheduler_role(book, settings), self.context)
            if settings.placement_scheduler == "shared"
            else None
        )
        self.changes: list[bool] = []
        self.metrics: list[ExecutorMetrics] = []
        self.changed = anyio.Event()
        self.supervisor = Supervisor(
            wiring.plans(book, settings, engine),
            context=self.context,
            inbox=inbox,
            to_scheduler_control=to_control,
            deadlines=deadlines,
            on_change=self._note,
            on_metrics=self._note_metrics,
            stop_times=StopTimes(shutdown_s=2.0, terminate_s=1.0),
            log_level="error",
        )

    def _note(self, ready: bool) -> None:  # noqa: FBT001 - the supervisor's callback
        self.changes.append(ready)
        self.changed.set()

    def _note_metrics(self, metrics: ExecutorMetrics) -> None:
        self.metrics.append(metrics)
        self.changed.set()

    async def wait_for_metrics(self, enough: Callable[[ExecutorMetrics], bool]) -> None:
        while not self.metrics or not enough(self.metrics[-1]):
            self.changed = anyio.Event()
            await self.changed.wait()

    async def wait_until(self, *, ready: bool) -> None:
        while not self.changes or self.changes[-1] is not ready:
            self.changed = anyio.Event()
            await self.changed.wait()

    def submit(self, rid: int, tokens: int) -> None:
        options = RequestOptions(max_tokens=tokens, ignore_eos=True)
        self.to_scheduler.post(Submit(Request(rid, options), [1, 2, 3]))

    async def hear(self) -> TokenizerMessage:
        """The next message to the tokenizer, which passes on the end of a batch."""
        message = await self.tokenizer.receive()
        if isinstance(message, BatchEnded):
            self.to_scheduler.post(message)
        return message

    async def until_ended(self, *rids: int) -> dict[int, str]:
        """How these requests ended: a finish reason or an error code."""
        ends: dict[int, str] = {}
        while not set(rids) <= set(ends):
            message = await self.hear()
            if isinstance(message, RowsFailed):
                ends.update(dict.fromkeys(message.rids, message.code))
            elif isinstance(message, Step):
                for rid, token in zip(message.rids, message.tokens, strict=True):
                    if token.finish is not None:
                        assert rid not in ends
                        ends[rid] = token.finish
        return ends

    async def until_running(self, rid: int) -> None:
        while not (isinstance(message := await self.hear(), Step) and rid in message.rids):
            pass

    async def freeze_executor(self, tokens: int) -> int:
        """Stop the executor's process while it runs request 1; returns its id."""
        await self.wait_until(ready=True)
        self.submit(1, tokens)
        await self.until_running(1)
        pid = self.supervisor.process_ids()["executor"]
        os.kill(pid, signal.SIGSTOP)
        return pid

    async def end_scheduler(self) -> None:
        """Let a scheduler that never ran close its mailboxes."""
        assert self.scheduler is not None
        with anyio.move_on_after(0):
            await self.scheduler.run()

    def close(self) -> None:
        for mailbox in (self.tokenizer, self.door, self.to_scheduler):
            mailbox.close()
        self.context.term()


@asynccontextmanager
async def house(
    folder: Path, settings: Settings = SETTINGS, deadlines: Deadlines = DEADLINES
) -> AsyncIterator[House]:
    made = House(folder, settings, deadlines)
    try:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                if made.scheduler is not None:
                    tasks.start_soon(made.scheduler.run)
                tasks.start_soon(made.supervisor.run)
                yield made
                made.supervisor.stop()
                await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
    finally:
        made.close()


def is_alive(pid: int) -> bool:
    """Whether the process exists, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != "engine"]


async def test_a_killed_executor_fails_what_it_held_and_comes_back(short_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with house(short_folder) as made:
            await made.wait_until(ready=True)
            first = made.supervisor.process_ids()["executor"]
            for rid in range(8):
                made.submit(rid, 1000)
            await made.until_running(7)
            made.submit(100, 5)
            await anyio.sleep(0.05)
            os.kill(first, signal.SIGKILL)
            killed = time.monotonic()
            ends = await made.until_ended(*range(8))
            assert time.monotonic() - killed < DEADLINES.progress_s
            assert set(ends.values()) == {"executor_failed"}
            assert await made.until_ended(100) == {100: "length"}
            made.submit(200, 5)
            assert await made.until_ended(200) == {200: "length"}
            assert made.changes == [True, False, True]
            second = made.supervisor.process_ids()["executor"]
            assert second != first
            assert not is_alive(first)
        assert not is_alive(second)
    assert [line["reason"] for line in logs if line["event"] == "actor lost"] == [
        "it was ended by SIGKILL"
    ]


async def test_what_the_executor_measures_is_passed_on(short_folder: Path) -> None:
    async with house(short_folder) as made:
        await made.wait_until(ready=True)
        made.submit(1, 20)
        await made.until_ended(1)
        await made.wait_for_metrics(lambda metrics: metrics.generation.tokens >= 19)
    assert made.metrics[-1].prefill.tokens >= 3
    assert made.metrics[-1].speculation.rounds == 0


async def test_a_hung_executor_is_killed_and_replaced(short_folder: Path) -> None:
    deadlines = Deadlines(hello_s=20, load_s=20, progress_s=2.5, pause_s=0.05)
    with structlog.testing.capture_logs():
        async with house(short_folder, deadlines=deadlines) as made:
            pid = await made.freeze_executor(tokens=1000)
            stopped = time.monotonic()
            assert await made.until_ended(1) == {1: "executor_failed"}
            assert time.monotonic() - stopped > 1.0
            made.submit(2, 3)
            assert await made.until_ended(2) == {2: "length"}
            assert not is_alive(pid)


async def test_an_executor_that_stood_still_together_with_the_daemon_is_kept(
    short_folder: Path,
) -> None:
    deadlines = Deadlines(hello_s=20, load_s=20, progress_s=4.0, pause_s=0.05)
    async with house(short_folder, deadlines=deadlines) as made:
        pid = await made.freeze_executor(tokens=100)
        time.sleep(5.0)  # noqa: ASYNC251 - the loop is to stand still
        os.kill(pid, signal.SIGCONT)
        assert await made.until_ended(1) == {1: "length"}
        assert made.changes == [True]


async def test_a_stop_leaves_no_process_and_no_file(short_folder: Path) -> None:
    async with house(short_folder) as made:
        await made.wait_until(ready=True)
        pid = made.supervisor.process_ids()["executor"]
        made.submit(1, 1000)
        await made.until_running(1)
        made.supervisor.stop()
        assert await made.until_ended(1) == {1: "shutting_down"}
    assert not is_alive(pid)
    assert not left_over(short_folder)


async def test_a_hung_executor_does_not_keep_the_daemon(short_folder: Path) -> None:
    async with house(short_folder) as made:
        await made.wait_until(ready=True)
        pid = made.supervisor.process_ids()["executor"]
        os.kill(pid, signal.SIGSTOP)
    assert not is_alive(pid)
    assert not left_over(short_folder)


async def test_an_executor_that_keeps_dying_ends_the_daemon(short_folder: Path) -> None:
    settings = Settings(engine_kind="simulated", restart_limit=1)
    made = House(short_folder, settings, DEADLINES)
    failures: list[HearthError] = []

    async def supervise(tasks: anyio.abc.TaskGroup) -> None:
        try:
            await made.supervisor.run()
        except HearthError as error:
            failures.append(error)
        tasks.cancel_scope.cancel()

    with structlog.testing.capture_logs(), anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            assert made.scheduler
            tasks.start_soon(made.scheduler.run)
            tasks.start_soon(supervise, tasks)
            for _ in range(2):
                await made.wait_until(ready=True)
                os.kill(made.supervisor.process_ids()["executor"], signal.SIGKILL)
                await made.wait_until(ready=False)
            await anyio.sleep_forever()
    made.close()
    assert failures[0].code == "executor_failed"
    assert failures[0].message == (
        "the executor was lost, 1 restarts did not help: it was ended by SIGKILL"
    )


async def test_an_engine_that_cannot_load_ends_the_daemon_with_its_reason(
    short_folder: Path,
) -> None:
    (short_folder / "engine").mkdir()
    made = House(short_folder, SETTINGS, DEADLINES)
    with anyio.fail_after(30), pytest.raises(HearthError) as caught:
        await made.supervisor.run()
    await made.end_scheduler()
    made.close()
    assert caught.value.code == "engine_missing"


class SilentThread:
    """A thread that hangs: no hello, and no end."""

    can_be_killed = False

    def __init__(self, *_arguments: object) -> None:
        self.asked = False

    async def wait(self) -> str:
        await anyio.sleep_forever()
        raise AssertionError

    def terminate(self) -> None:
        self.asked = True

    def kill(self) -> None:
        """As the real one: nothing."""


async def test_an_executor_that_hangs_in_the_daemon_s_process_ends_the_daemon(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.supervision.supervisor.ThreadHandle", SilentThread)
    settings = Settings(engine_kind="simulated", placement_executor="shared")
    made = House(short_folder, settings, Deadlines(hello_s=0.2))
    with structlog.testing.capture_logs(), anyio.fail_after(20):
        with pytest.raises(HearthError) as caught:
            await made.supervisor.run()
        await made.end_scheduler()
    made.close()
    assert caught.value.message == (
        "the executor hangs in the daemon's process, it did not say hello within 0.2 s: start again"
    )


@pytest.mark.parametrize(
    "places",
    [
        {"placement_executor": "shared"},
        {"placement_scheduler": "process"},
        {"placement_scheduler": "process", "placement_executor": "shared"},
    ],
    ids=str,
)
async def test_every_placement_serves(short_folder: Path, places: dict[str, Any]) -> None:
    settings = Settings(engine_kind="simulated", fill_wait_ms=1.0, **places)
    async with house(short_folder, settings) as made:
        await made.wait_until(ready=True)
        assert made.supervisor.facts["backend"] == "simulated"
        for rid in range(20):
            made.submit(rid, 4)
        ends = await made.until_ended(*range(20))
        assert set(ends.values()) == {"length"}
        assert isinstance(await made.door.receive(), Accepted)
    assert not left_over(short_folder)
