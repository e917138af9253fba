"""Starts an actor in a process of its own, watches it, restarts it when it is lost, and ends it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.abc
import msgspec
import structlog

import hearth
from hearth.actors.addresses import CONTROL_LIMIT, Addresses, SocketFolder, remove_sockets
from hearth.actors.mailbox import MailboxFull, Receiver, Sender, ZmqContext
from hearth.actors.messages import ExecutorControl, SetLogLevel, Shutdown
from hearth.actors.roles import HostConfig
from hearth.actors.settings import LogSettings
from hearth.actors.supervisor_messages import (
    ActorFailed,
    ActorHello,
    ActorLoading,
    ActorProgress,
    ActorReady,
    AdapterAnswer,
    ExecutorMetrics,
    SupervisorMessage,
)
from hearth.daemon.supervision.file_watch import FileWatch, Mark, Marks, WatchedFile
from hearth.daemon.supervision.restart_policy import (
    Action,
    AnnounceHeld,
    AnnounceLost,
    AnnounceReady,
    AnnounceRestart,
    GiveUp,
    Kill,
    Phase,
    Start,
    Supervision,
    SupervisionSettings,
    stuck,
)
from hearth.daemon.watchdog import LoopHealth
from hearth.runtime.errors import HearthError, known_code
from hearth.runtime.loading import Stage
from hearth_client.running_clock import RunningClock

# Modules are looked for where a process starts: there must be the same code as here, and not
# whatever is in the folder where the daemon was started.
_SOURCE = Path(hearth.__file__).resolve().parents[1]


ENDED_WELL = "it ended with status 0"
"""End of a process that found no fault."""


class ActorProcess:
    """A process of `hearth.actors.host`."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the end of the process has not been seen yet."""
        return self._process.returncode is None

    @classmethod
    async def start(cls, config: HostConfig) -> ActorProcess:
        """Start the actor; its output goes where the daemon's goes. Raises OSError."""
        argument = msgspec.json.encode(config).decode()
        process = await anyio.open_process(
            [sys.executable, "-m", "hearth.actors.host", argument],
            stdin=subprocess.DEVNULL,
            stdout=None,
            stderr=None,
            cwd=_SOURCE,
            pass_fds=config.descriptors,
        )
        return cls(process)

    async def wait(self) -> str:
        """Wait for the end and reap the process; how it came, as the end of a sentence."""
        status = await self._process.wait()
        if status < 0:
            return f"it was ended by {_signal(-status)}"
        return f"it ended with status {status}" if status else ENDED_WELL

    def kill(self) -> None:
        """Send SIGKILL, if the process still runs."""
        if self.alive:
            self._process.kill()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most real-time signals have no name.
        return f"signal {number}"


_log = structlog.get_logger("hearth.supervisor")
_LAST_MESSAGES_S = 0.5
_TICK_S = 1.25
"""Seconds between two ticks, more than between two signs of progress: one wake-up serves both."""
_MOST_S = 1.5
"""Seconds that a pause of the daemon counts of a deadline, since the actor may have paused too."""


class ActorPlan(NamedTuple):
    """An actor to keep: its role, as the host knows it, its settings, and its logging.

    Its process inherits `descriptors`. If one of its `files` is changed in place the actor
    ends, and the next one starts once the files are at rest.
    """

    role: str
    settings: msgspec.Struct
    supervision: SupervisionSettings = SupervisionSettings()
    shutdown_s: float = 5.0
    logs: LogSettings = LogSettings()
    epoch: str = ""
    descriptors: tuple[int, ...] = ()
    files: tuple[WatchedFile, ...] = ()


class Listeners(NamedTuple):
    """Listeners to the events of an actor.

    The events are: ready to work, loss of all its work, progress of loading, a restart and its
    reason, a wait for files, metrics, and answers about adapters.
    """

    ready: Callable[[ActorReady, Addresses], Awaitable[None]]
    lost: Callable[[str], Awaitable[None]]
    loading: Callable[[Stage, float | None], None] = lambda _stage, _share: None
    restarting: Callable[[str], None] = lambda _reason: None
    held: Callable[[AnnounceHeld], None] = lambda _held: None
    metrics: Callable[[ExecutorMetrics], None] = lambda _metrics: None
    adapter: Callable[[AdapterAnswer], None] = lambda _answer: None


class Supervisor:
    """Keeps one actor alive through its incarnations; owns its inbox."""

    def __init__(
        self,
        plan: ActorPlan,
        *,
        context: ZmqContext,
        sockets: SocketFolder,
        inbox: Receiver[SupervisorMessage],
        listeners: Listeners,
    ) -> None:
        self._plan = plan
        self._context = context
        self._sockets = sockets
        self._inbox = inbox
        self._tell = listeners
        self._policy = Supervision(plan.role, plan.supervision)
        self._files = FileWatch()
        self._clock = RunningClock(_MOST_S)
        self._name = ""
        self._addresses = sockets.addresses(plan.role, 0)
        self._process: ActorProcess | None = None
        self._control: Sender[ExecutorControl] | None = None
        self._said_ready = ActorReady("", 0)
        self._last_progress = 0.0
        self._turned = 0.0
        self._ends_by: float | None = None
        self._failure_reported = anyio.Event()
        self._wake = anyio.Event()
        self._ended = anyio.Event()
        self._error: HearthError | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def pid(self) -> int | None:
        """The actor's process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        """Starts of the actor but the first."""
        return max(0, self._policy.incarnation - 1)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last sign of progress of an actor that works; None while none works."""
        return self._clock.now() - self._last_progress if self._policy.working else None

    @property
    def spoiled(self) -> bool:
        """True if the actor is being ended because its files were changed under it."""
        return self._policy.spoiled is not None

    def differing_files(self) -> list[str]:
        """Files that have changed since the actor read them."""
        return self._files.differing(_marks(self._files.paths))

    @property
    def health(self) -> LoopHealth:
        """Health of this loop, for the watchdog."""
        now = self._clock.now()
        if self._ends_by is not None:
            return LoopHealth(now, now, self._ends_by)
        due = self._policy.next_wake()
        # The first start is due from ever on, and so not late.
        return LoopHealth(now, self._turned, None if due == -math.inf else due)

    async def run(self) -> None:
        """Keep the actor until `stop` or cancellation, then end it.

        Raises HearthError when it cannot be kept or ended.
        """
        try:
            with self._inbox:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(self._listen)
                    await self._keep()
                    tasks.cancel_scope.cancel()
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await self._end()
            finally:
                self._close_control()
                self._ended.set()
        if self._error is not None:
            raise self._error

    def adopt(self, plan: ActorPlan) -> None:
        """Keep the actor by another plan; its settings take effect at the next start."""
        self._policy.adopt(plan.supervision)
        if plan.logs.log_level != self._plan.logs.log_level:
            self.tell(SetLogLevel(plan.logs.log_level))
        other = plan.settings != self._plan.settings
        self._plan = plan
        if other:
            self._policy.release(self._clock.now())
        self._wake.set()

    def renew(self, reason: str) -> bool:
        """Let a new actor of the plan take over once the running one has ended its work.

        Returns True if the running actor has been asked to end; without one the next start has the
        plan.
        """
        self._policy.release(self._clock.now())
        self._wake.set()
        asked = self._process is not None and self.tell(Shutdown(after_rows=True))
        if asked:
            self._policy.renew(reason)
        return asked

    async def stop(self) -> None:
        """Let `run` end the actor, and wait until it has."""
        self._policy.stop()
        self._wake.set()
        await self._ended.wait()

    def tell(self, message: ExecutorControl) -> bool:
        """Post to the actor's control inbox; False if it takes no mail, as an actor that hangs."""
        if self._control is None:
            return False
        try:
            self._control.post(message)
        except MailboxFull:
            return False
        return True

    async def _keep(self) -> None:
        while self._policy.phase is not Phase.ENDED:
            due = self._policy.next_wake()
            left = None if due is None else due - self._clock.now()
            with anyio.move_on_after(_TICK_S if left is None else min(left, _TICK_S)):
                await self._wake.wait()
            self._wake = anyio.Event()
            await self._act(self._look_at_files(self._clock.now()))
            await self._act(self._policy.tick(self._clock.now()))
            self._turned = self._clock.now()

    def _look_at_files(self, now: float) -> list[Action]:
        """Hold the actor whose files are changed, and start it once they are at rest."""
        if not self._files.paths:
            return []
        changed = self._files.look(_marks(self._files.paths), now)
        if self._policy.held and self._files.may_start(now):
            _log.info("actor starts on its files as they are now", actor=self._plan.role)
            self._policy.release(now)
            return []
        if changed is None:
            return []
        what = "is cut short" if changed.cut else "is changed in place"
        text = f"{changed.path} {what}: exchange a file by mv and hearth reload"
        return self._policy.spoil(
            HearthError("weights_invalid", text, os.path.basename(changed.path)),  # noqa: PTH119
            now,
            refuses=changed.cut,
        )

    async def _listen(self) -> None:
        while True:
            message = await self._inbox.receive()
            # Mail of an earlier incarnation bears another name.
            if message.name == self._name:
                await self._handle(message)
                self._wake.set()

    async def _handle(self, message: SupervisorMessage) -> None:
        now = self._clock.now()
        match message:
            case ActorHello():
                self._policy.hello(now)
            case ActorLoading(_, stage, share):
                self._tell.loading(stage, share)
            case ActorReady():
                self._said_ready, self._last_progress = message, now
                self._files.worked()
                await self._act(self._policy.ready(now))
            case ActorProgress():
                self._last_progress = now
                self._policy.progress(now)
                if message.metrics is not None:
                    self._tell.metrics(message.metrics)
            case AdapterAnswer():
                self._tell.adapter(message)
            case ActorFailed(_, code, text, field):
                error = HearthError(known_code(code), text, field)
                self._policy.failed(error, others=self._files.are_others())
                # One that never worked ends the daemon, whose last line says the same.
                if self._policy.was_ready:
                    _log.error("actor failed", actor=self._name, code=code, reason=text)
                self._failure_reported.set()

    async def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(incarnation):
                    await self._start(incarnation)
                case Kill(reason):
                    _log.error("actor killed", actor=self._name, reason=reason)
                    if self._process is not None:
                        self._process.kill()
                case AnnounceReady():
                    _log.info("actor ready", actor=self._name)
                    await self._tell.ready(self._said_ready, self._addresses)
                case AnnounceLost(reason):
                    self._note_loss(reason)
                    await self._tell.lost(reason)
                case AnnounceRestart(reason):
                    self._tell.restarting(reason)
                case AnnounceHeld(error):
                    _log.error(
                        "actor waits for its files",
                        actor=self._plan.role,
                        reason=error.message,
                        code=error.code,
                    )
                    self._tell.held(action)
                case GiveUp(error):
                    self._error = error

    def _note_loss(self, reason: str) -> None:
        if self._policy.renewing:
            _log.info("actor replaced", actor=self._name, reason=reason)
        elif not self._failure_reported.is_set():
            _log.error("actor lost", actor=self._name, reason=reason)

    async def _start(self, incarnation: int) -> None:
        self._name = f"{self._plan.role}-{incarnation}"
        self._addresses = self._sockets.addresses(self._plan.role, incarnation)
        self._failure_reported = anyio.Event()
        files = self._plan.files
        self._files.began(files, _marks([file.path for file in files]), self._clock.now())
        config = self._config()
        try:
            # A cancelled start would leave a process behind.
            with anyio.CancelScope(shield=True):
                process = self._process = await ActorProcess.start(config)
        except OSError as error:
            how = f"its process could not be started ({error.strerror or error})"
            _log.error("actor not started", actor=self._name, reason=how)
            await self._act(self._policy.ended(how, self._clock.now()))
            return
        _log.debug("actor started", actor=self._name)
        self._control = Sender(self._context, self._addresses.control, CONTROL_LIMIT)
        if self._plan.logs.log_level != config.logs.log_level:
            # Another plan has come while it was started.
            self.tell(SetLogLevel(self._plan.logs.log_level))
        if self._tasks is not None:
            self._tasks.start_soon(self._watch, process)

    def _config(self) -> HostConfig:
        return HostConfig(
            name=self._name,
            role=self._plan.role,
            settings=msgspec.Raw(msgspec.json.encode(self._plan.settings)),
            addresses=self._addresses,
            parent=os.getpid(),
            logs=self._plan.logs,
            epoch=self._plan.epoch,
            descriptors=self._plan.descriptors,
        )

    async def _watch(self, process: ActorProcess) -> None:
        how = await process.wait()
        if not self._policy.working:
            # The reason of a failed start is in a message that may still be on its way.
            with anyio.move_on_after(_LAST_MESSAGES_S):
                await self._failure_reported.wait()
        self._process = None
        self._close_control()
        remove_sockets(self._addresses)
        # A mapped file that was cut short ends who reads it.
        await self._act(self._look_at_files(self._clock.now()))
        loading = self._policy.phase in (Phase.STARTING, Phase.LOADING)
        actions = self._policy.ended(how, self._clock.now(), well=how == ENDED_WELL)
        goes_on = not any(isinstance(action, GiveUp) for action in actions)
        if loading and goes_on and not self._failure_reported.is_set():
            _log.error("actor not started", actor=self._name, reason=how)
        await self._act(actions)
        self._wake.set()

    async def _end(self) -> None:
        self._ends_by = self._clock.now() + self._plan.shutdown_s + self._plan.supervision.kill_s
        process = self._process
        if process is None or not process.alive:
            return
        if self._policy.working:
            await self._ask_to_end(process)
        process.kill()
        # What was given up has been waited for.
        with anyio.move_on_after(0 if self._error else self._plan.supervision.kill_s):
            await process.wait()
        remove_sockets(self._addresses)
        if process.alive:
            raise self._error or stuck(self._plan.role, "the daemon stops")

    async def _ask_to_end(self, process: ActorProcess) -> None:
        if self.tell(Shutdown()):
            with anyio.move_on_after(self._plan.shutdown_s):
                await process.wait()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _marks(paths: Sequence[str]) -> Marks:
    return {path: _mark(path) for path in paths}


def _mark(path: str) -> Mark | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a path of many, looked at each second
    except OSError:
        return None
    return Mark(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
