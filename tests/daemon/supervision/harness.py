"""A supervisor with a scheduler and a simulated executor around it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import zmq
from msgspec import structs

from hearth.actors.addresses import DOOR, SCHEDULER, TOKENIZER, Addresses, SocketFolder
from hearth.actors.mailbox import Receiver, Sender
from hearth.actors.messages import (
    DoorMessage,
    ExecutorLost,
    ExecutorReady,
    Failed,
    Request,
    SchedulerMessage,
    StepOutput,
    TokenizerMessage,
)
from hearth.actors.scheduler.actor import open_scheduler
from hearth.actors.supervisor_messages import ActorReady, ExecutorMetrics, SupervisorMessage
from hearth.daemon.configuration.settings import Settings, settings_of
from hearth.daemon.engine_settings import executor_plan, executor_ready
from hearth.daemon.supervision.restart_policy import SupervisionSettings
from hearth.daemon.supervision.supervisor import Listeners, Supervisor
from hearth.runtime.engine_folder import write_config
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.request import RequestOptions

DEADLINES = SupervisionSettings(hello_s=20, load_timeout_s=20, progress_timeout_s=20, pause_s=0.05)
SETTINGS = settings_of(engine_kind="simulated", step_ms=5.0, fill_wait_ms=1.0, log_level="error")
SIMULATED = simulated_config(max_batch=8, capacity=2048)


class Harness:
    """A supervisor and a scheduler that work; tokenizer and front door are the test."""

    def __init__(self, folder: Path, settings: Settings, deadlines: SupervisionSettings) -> None:
        engine = folder / "engine"
        if not engine.exists():
            engine.mkdir()
            write_config(engine, SIMULATED)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = SocketFolder(folder)
        self.tokenizer: Receiver[TokenizerMessage] = Receiver(
            self.context, [TOKENIZER, sockets.tokenizer], TokenizerMessage, 4096
        )
        self.door: Receiver[DoorMessage] = Receiver(self.context, [DOOR], DoorMessage, 4096)
        self.to_tokenizer: Sender[TokenizerMessage] = Sender(self.context, TOKENIZER, 100)
        self.to_scheduler: Sender[SchedulerMessage] = Sender(self.context, SCHEDULER, 100)
        self.scheduler = open_scheduler(self.context, settings.scheduler)
        self.executor: int | None = None
        self.changes: list[bool] = []
        self.loading: list[tuple[str, float | None]] = []
        self.restarts: list[str] = []
        self.metrics: list[ExecutorMetrics] = []
        self.changed = anyio.Event()
        plan = executor_plan(settings, engine)
        self.supervisor = Supervisor(
            plan._replace(
                supervision=structs.replace(
                    deadlines, restart_limit=settings.supervision.restart_limit
                ),
                shutdown_s=2.0,
            ),
            context=self.context,
            sockets=sockets,
            inbox=Receiver(self.context, [sockets.supervisor("executor")], SupervisorMessage, 4096),
            listeners=Listeners(
                loading=lambda stage, share: self.loading.append((stage, share)),
                ready=self._ready,
                lost=self._lost,
                restarting=self.restarts.append,
                metrics=self._note_metrics,
            ),
        )

    @property
    def pid(self) -> int:
        pid = self.supervisor.pid
        assert pid is not None
        return pid

    async def _ready(self, ready: ActorReady, addresses: Addresses) -> None:
        self.to_tokenizer.post(executor_ready(ready, addresses))
        self.changes.append(True)
        self.changed.set()

    async def _lost(self, reason: str) -> None:
        self.to_tokenizer.post(ExecutorLost(reason))
        self.changes.append(False)
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
        self.to_scheduler.post(Request(rid, options, token_ids=[1, 2, 3]))

    async def hear(self) -> TokenizerMessage:
        """The next message to the tokenizer, which tells the scheduler what became of rows."""
        message = await self.tokenizer.receive()
        match message:
            case StepOutput():
                told = message.without_tokens()
                if told is not None and message.incarnation == self.executor:
                    self.to_scheduler.post(told)
            case ExecutorReady(incarnation):
                self.executor = incarnation
                self.to_scheduler.post(message)
            case ExecutorLost():
                self.executor = None
                self.to_scheduler.post(message)
        return message

    async def until_ended(self, *rids: int) -> dict[int, str]:
        """How these requests ended: a finish reason or an error code."""
        ends: dict[int, str] = {}
        while not set(rids) <= set(ends):
            message = await self.hear()
            if isinstance(message, Failed):
                ends.update(dict.fromkeys(message.rids, message.code))
            elif isinstance(message, StepOutput):
                ends.update({rid: one.code for one in message.failed for rid in one.rids})
                for token in message.tokens:
                    if token.finish is not None:
                        assert token.row not in ends
                        ends[token.row] = token.finish
        return ends

    async def until_running(self, rid: int) -> None:
        while not (
            isinstance(message := await self.hear(), StepOutput)
            and rid in [token.row for token in message.tokens]
        ):
            pass

    async def freeze_executor(self, tokens: int) -> int:
        """Stop the executor's process while it runs request 1; returns its id."""
        await self.wait_until(ready=True)
        self.submit(1, tokens)
        await self.until_running(1)
        os.kill(self.pid, signal.SIGSTOP)
        return self.pid

    async def end_scheduler(self) -> None:
        """Let a scheduler that never ran close its mailboxes."""
        with anyio.move_on_after(0):
            await self.scheduler.run()

    def close(self) -> None:
        for mailbox in (self.tokenizer, self.door, self.to_tokenizer, self.to_scheduler):
            mailbox.close()
        self.context.term()


@asynccontextmanager
async def harness(
    folder: Path, settings: Settings = SETTINGS, deadlines: SupervisionSettings = DEADLINES
) -> AsyncIterator[Harness]:
    made = Harness(folder, settings, deadlines)
    try:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.scheduler.run)
                tasks.start_soon(made.supervisor.run)
                yield made
                await made.supervisor.stop()
                tasks.cancel_scope.cancel()
    finally:
        made.close()
