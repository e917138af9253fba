"""Starts the actors, watches them, restarts a lost executor, and ends them all."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

import anyio
import anyio.abc
import structlog
from anyio.abc import TaskStatus
from hearth_client.running_clock import RunningClock

from actors.addresses import CONTROL_LIMIT, ExecutorAddresses
from actors.logs import Format, Level
from actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
from actors.messages import (
    ActorFailed,
    ActorHello,
    ActorProgress,
    ActorReady,
    ExecutorControl,
    ExecutorLost,
    ExecutorMetrics,
    ExecutorReady,
    SchedulerControl,
    Shutdown,
    SupervisorMessage,
)
from actors.roles import AnyRole, ExecutorRole
from daemon.supervision.actor_process import ActorHandle, ProcessHandle, ThreadHandle
from daemon.supervision.restart_policy import (
    Action,
    AnnounceLost,
    AnnounceReady,
    Deadlines,
    GiveUp,
    Kill,
    Phase,
    Start,
    Supervision,
)
from runtime.errors import CODES, Code, HearthError

_log = structlog.get_logger("hearth.supervisor")
_SEND_TIMEOUT_S = 5.0
_LAST_WORDS_S = 0.5
_TICK_S = 1.0
_MOST_S = 1.5
"""What a pause of the daemon counts of an actor's deadline, since the actor may have paused too."""


class ActorPlan(NamedTuple):
    """An actor to keep: its role in each incarnation, where it runs and how often it may restart.

    `clean_up` removes what an incarnation that was killed may have left.
    """

    name: str
    role: Callable[[int], AnyRole]
    own_process: bool
    restart_limit: int = 0
    clean_up: Callable[[int], None] = lambda _incarnation: None


class StopTimes(NamedTuple):
    """Seconds that an actor gets to end after a message, and then after SIGTERM."""

    shutdown_s: float = 5.0
    terminate_s: float = 2.0


class _Unit:
    """One actor with its supervision and, while it lives, its handle."""

    def __init__(self, plan: ActorPlan, deadlines: Deadlines) -> None:
        self.plan = plan
        self.supervision = Supervision(plan.name, deadlines, plan.restart_limit)
        self.handle: ActorHandle | None = None
        self.name = ""
        self.executor: ExecutorAddresses | None = None
        self.wake = anyio.Event()
        self.told_failure = anyio.Event()
        self.ready = False


class Supervisor:
    """Keeps the planned actors alive; owns the mailboxes that it is given.

    `on_change` is called with whether all actors can work, each time that this changes;
    `on_metrics` with what the executor has done, as often as it tells.
    """

    def __init__(
        self,
        plans: Sequence[ActorPlan],
        *,
        context: ZmqContext,
        inbox: Receiver[SupervisorMessage],
        to_scheduler_control: Sender[SchedulerControl],
        deadlines: Deadlines,
        on_change: Callable[[bool], None] = lambda _ready: None,
        on_metrics: Callable[[ExecutorMetrics], None] = lambda _metrics: None,
        stop_times: StopTimes = StopTimes(),  # noqa: B008 - immutable
        log_level: Level = "info",
        log_format: Format = "auto",
    ) -> None:
        self.facts: dict[str, str | int | float] = {}
        self.limits: ExecutorReady | None = None
        self._units = [_Unit(plan, deadlines) for plan in plans]
        self._clock = RunningClock(_MOST_S)
        self._context = context
        self._inbox = inbox
        self._to_scheduler_control = to_scheduler_control
        self._on_change = on_change
        self._on_metrics = on_metrics
        self._stop_times = stop_times
        self._logging: tuple[Level, Format] = (log_level, log_format)
        self._stopping = anyio.Event()
        self._error: HearthError | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the actors until `stop` or cancellation, then end them.

        Raises HearthError when one cannot be kept.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._listen)
                for unit in self._units:
                    tasks.start_soon(self._keep, unit)
                task_status.started()
                await self._stopping.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._end_all()
            self._inbox.close()
            self._to_scheduler_control.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let `run` end all actors and return."""
        self._stopping.set()

    def process_ids(self) -> dict[str, int]:
        """The processes of actors that run in their own, by actor."""
        return {
            unit.plan.name: unit.handle.pid
            for unit in self._units
            if isinstance(unit.handle, ProcessHandle)
        }

    async def _listen(self) -> None:
        while True:
            message = await self._inbox.receive()
            # Mail of an earlier incarnation bears a name that no unit has any more.
            unit = next((unit for unit in self._units if unit.name == message.name), None)
            if unit is not None:
                await self._hear(unit, message)
                unit.wake.set()

    async def _hear(self, unit: _Unit, message: SupervisorMessage) -> None:
        now = self._clock.now()
        match message:
            case ActorHello():
                unit.supervision.hello(now)
            case ActorReady():
                self._note(unit, message)
                await self._act(unit, unit.supervision.ready(now))
            case ActorProgress():
                unit.supervision.progress(now)
                if message.metrics is not None:
                    self._on_metrics(message.metrics)
            case ActorFailed(_, code, text, field):
                known = cast("Code", code) if code in CODES else "internal"
                unit.supervision.failed(HearthError(known, text, field))
                unit.told_failure.set()

    async def _keep(self, unit: _Unit) -> None:
        while True:
            unit.wake = anyio.Event()
            await self._act(unit, unit.supervision.tick(self._clock.now()))
            due = unit.supervision.next_wake()
            left = None if due is None else due - self._clock.now()
            with anyio.move_on_after(None if left is None else min(left, _TICK_S)):
                await unit.wake.wait()

    async def _watch(self, unit: _Unit, handle: ActorHandle, incarnation: int) -> None:
        how = await handle.wait()
        if unit.supervision.phase is not Phase.RUNNING:
            # Why it could not start is told by mail that may still be on its way.
            with anyio.move_on_after(_LAST_WORDS_S):
                await unit.told_failure.wait()
        unit.handle = None
        unit.plan.clean_up(incarnation)
        await self._act(unit, unit.supervision.ended(how, self._clock.now()))
        unit.wake.set()

    async def _act(self, unit: _Unit, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(incarnation):
                    await self._start(unit, incarnation)
                case Kill(reason):
                    self._kill(unit, reason)
                case AnnounceReady():
                    await self._announce_ready(unit)
                case AnnounceLost(reason):
                    await self._announce_lost(unit, reason)
                case GiveUp(error):
                    self._give_up(error)

    async def _start(self, unit: _Unit, incarnation: int) -> None:
        unit.name = f"{unit.plan.name}-{incarnation}"
        unit.told_failure = anyio.Event()
        role = unit.plan.role(incarnation)
        unit.executor = role.inboxes if isinstance(role, ExecutorRole) else None
        if unit.plan.own_process:
            unit.handle = await ProcessHandle.start(unit.name, role, *self._logging)
        else:
            unit.handle = ThreadHandle(unit.name, role, self._context)
        _log.debug("actor started", actor=unit.name)
        if self._tasks is not None:
            self._tasks.start_soon(self._watch, unit, unit.handle, incarnation)

    def _kill(self, unit: _Unit, reason: str) -> None:
        _log.error("actor killed", actor=unit.name, reason=reason)
        if unit.handle is None:
            return
        if unit.handle.can_be_killed:
            unit.handle.kill()
        else:
            self._give_up(
                HearthError(
                    "executor_failed",
                    f"the {unit.plan.name} hangs in the daemon's process, {reason}: start again",
                    unit.plan.name,
                )
            )

    def _note(self, unit: _Unit, message: ActorReady) -> None:
        if unit.executor is not None and message.limits is not None:
            limits = message.limits
            self.facts = message.facts
            self.limits = ExecutorReady(
                work=unit.executor.work,
                control=unit.executor.control,
                max_batch=limits.max_batch,
                max_prompt_tokens=limits.max_prompt_tokens,
                max_total_tokens=limits.max_total_tokens,
            )

    async def _announce_ready(self, unit: _Unit) -> None:
        _log.info("actor ready", actor=unit.name)
        if unit.executor is not None and self.limits is not None:
            await self._to_scheduler_control.send(self.limits, _SEND_TIMEOUT_S)
        unit.ready = True
        if all(other.ready for other in self._units):
            self._on_change(True)

    async def _announce_lost(self, unit: _Unit, reason: str) -> None:
        _log.error("actor lost", actor=unit.name, reason=reason)
        if unit.executor is not None:
            await self._to_scheduler_control.send(ExecutorLost(reason), _SEND_TIMEOUT_S)
        unit.ready = False
        self._on_change(False)

    def _give_up(self, error: HearthError) -> None:
        self._error = self._error or error
        self._stopping.set()

    async def _end_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for unit in self._units:
                tasks.start_soon(self._end, unit)

    async def _end(self, unit: _Unit) -> None:
        handle = unit.handle
        if handle is None:
            return
        # A message is all that ends a thread; a process that does not work yet reads none.
        if unit.supervision.phase is Phase.RUNNING or not handle.can_be_killed:
            await self._ask_to_end(unit, handle)
        unit.supervision.stop()
        handle.terminate()
        with anyio.move_on_after(self._stop_times.terminate_s):
            await handle.wait()
        handle.kill()
        if handle.can_be_killed:
            await handle.wait()
        unit.plan.clean_up(unit.supervision.incarnation)

    async def _ask_to_end(self, unit: _Unit, handle: ActorHandle) -> None:
        if unit.executor is None:
            return
        control: Sender[ExecutorControl] = Sender(
            self._context, unit.executor.supervisor_control, CONTROL_LIMIT
        )
        with control, suppress(MailboxFull):  # full means gone before it was told
            control.post(Shutdown())
            with anyio.move_on_after(self._stop_times.shutdown_s):
                await handle.wait()
