"""The daemon's process: front door, tokenizer, scheduler and supervisor in one event loop."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog
import zmq
from msgspec import structs

from actors.addresses import (
    CONTROL_LIMIT,
    DOOR,
    SCHEDULER,
    SCHEDULER_CONTROL,
    TOKENIZER,
    WORK_LIMIT,
    Addresses,
    SocketFolder,
)
from actors.journal import Journal
from actors.logs import LossyStream, certain_log, configure_logging
from actors.mailbox import Receiver, Sender, ZmqContext
from actors.messages import (
    ActorReady,
    DoorMessage,
    ExecutorLost,
    SchedulerControl,
    SupervisorMessage,
)
from actors.private_folder import private_folder
from actors.scheduler import open_scheduler
from actors.tokenizer import open_tokenizer
from daemon import wiring
from daemon.configuration.settings import Settings
from daemon.control.messages import (
    CancelRequest,
    ControlRequest,
    Metrics,
    MetricsText,
    Reload,
    Reloaded,
    Top,
    Trace,
    control_path,
)
from daemon.control.server import ControlServer, Handler
from daemon.door.finished import Listener
from daemon.door.front_door import FrontDoor
from daemon.exit_codes import FORCED, STOPPED, exit_code
from daemon.life import Life
from daemon.metrics.collector import Look
from daemon.metrics.endpoint import OPENMETRICS, Form, open_endpoints
from daemon.metrics.registry import DaemonMetrics
from daemon.notify import notify, tell_state
from daemon.supervision.supervisor import Listeners, Supervisor
from daemon.tracing.history import History
from daemon.tracing.otlp import open_spans
from daemon.tracing.overview import Overview
from daemon.watchdog import Watchdog
from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.deployment import load_deployment
from runtime.errors import HearthError
from runtime.memory.system import available_memory

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

_SEND_TIMEOUT_S = 5.0
_END_S = 15.0
"""How long a stop may take behind its drain: the executor is asked to end, and then killed."""
_log = structlog.get_logger("hearth")


def serve(settings: Settings, engine: Path) -> int:
    """Serve the engine folder until told to stop; the exit code, as docs/operations.md has them.

    A failure is logged.
    """
    log = configure_logging(settings.log_level, settings.log_format)
    try:
        # The executor checks the digests.
        options = structs.replace(wiring.runtime_options(settings), verify=False)
        deployment = load_deployment(engine, options)
        with private_folder() as sockets, zmq.Context() as context:
            arguments = (settings, engine, deployment.base, context, SocketFolder(sockets))
            main = partial(_serve, *arguments, log=log)
            return anyio.run(main, backend_options={"use_uvloop": True})
    except (HearthError, BaseExceptionGroup) as error:
        reason = _reason(error)
        tell_state(Life().failed(reason.message))
        _log.error(reason.message, code=reason.code, field=reason.field)
        return exit_code(reason)


async def _serve(
    settings: Settings,
    engine: Path,
    config: LLMEngineRunnerConfig,
    context: ZmqContext,
    sockets: SocketFolder,
    *,
    log: LossyStream | Journal,
) -> int:
    with ExitStack() as opened:
        service = Service(
            settings, engine, config, context=context, sockets=sockets, log=log, opened=opened
        )
        return await service.run()


class Service:
    """All that runs in the daemon's process; the constructor takes the socket at once.

    What it opens is closed at the end of `opened`.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Path,
        config: LLMEngineRunnerConfig,
        *,
        context: ZmqContext,
        sockets: SocketFolder,
        log: LossyStream | Journal,
        opened: ExitStack,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._config = config
        self._context = context
        self._sockets = sockets
        self._log = log
        self._opened = opened
        self._life = Life()
        self._to_scheduler_control: Sender[SchedulerControl] = self._sender(SCHEDULER_CONTROL)
        self._metrics = DaemonMetrics(
            wiring.metrics_info(engine.name, config),
            wiring.metrics_limits(settings),
            look=self._look,
            executor=lambda: self._supervisor.pid,
        )
        self._history = History()
        self._door = self._make_door()
        opened.callback(self._door.close)
        self._endpoints = open_endpoints(
            settings.metrics_port, settings.metrics_socket, self._metrics.expose
        )
        for endpoint in self._endpoints:
            opened.callback(endpoint.close)
        self._control = self._open_control()
        self._supervisor = self._make_supervisor()
        self._watchdog = Watchdog(
            lambda: self._supervisor.pulse, settings.load_timeout_s, os.environ
        )

    async def run(self) -> int:
        """Serve until a signal; raises what a part of it cannot go on for, alone or in a group."""
        structlog.contextvars.bind_contextvars(epoch=self._door.epoch)
        with anyio.open_signal_receiver(*_stop_signals()) as signals:
            async with anyio.create_task_group() as tasks:
                # Start.
                tokenizer = open_tokenizer(self._context, self._engine, self._sockets.tokenizer)
                scheduler = open_scheduler(self._context, wiring.policy_settings(self._settings))
                for part in (tokenizer, scheduler, self._door, self._supervisor):
                    tasks.start_soon(part.run)
                for endpoint in self._endpoints:
                    tasks.start_soon(endpoint.run)
                if self._control is not None:
                    tasks.start_soon(self._control.run)
                if "NOTIFY_SOCKET" in os.environ:
                    tasks.start_soon(self._watchdog.run)
                # Wait.
                number = await anext(signals)
                _log.info("stopping", signal=number.name)
                notify("STOPPING=1")
                self._enter(self._life.draining(number.name))
                self._watchdog.stops(self._settings.drain_s + _END_S)
                # Drain, unless a second signal comes.
                with anyio.CancelScope() as patience:
                    tasks.start_soon(_lose_patience, signals, patience)
                    await self._door.stop(self._settings.drain_s)
                if patience.cancelled_caught:
                    _log.info("stopping at once")
                # Stop.
                # Before the door gives up the lock: the next daemon has sockets of these names.
                for endpoint in self._endpoints:
                    await endpoint.stop()
                if self._control is not None:
                    await self._control.stop()
                await self._door.stop()
                await self._supervisor.stop()
                tasks.cancel_scope.cancel()
        # What is still asked for is under way, and no reason for another exit code.
        for asked in _stop_signals():
            signal.signal(asked, signal.SIG_IGN)
        _log.info("stopped")
        return FORCED if patience.cancelled_caught else STOPPED

    async def _executor_ready(self, ready: ActorReady, addresses: Addresses) -> None:
        told = wiring.executor_ready(ready, addresses)
        await self._to_scheduler_control.send(told, _SEND_TIMEOUT_S)
        if not self._life.serves:
            return
        model = self._engine.name
        # What fits into the memory that was free is for the executor to know.
        config = wiring.within(self._config, told.limits)
        facts = wiring.door_facts(self._settings, model, config, ready.facts)
        self._door.tell(facts=facts)
        self._enter(self._life.ready())
        notify("READY=1")
        self._watchdog.serves()
        certain_log("hearth").info(
            "ready",
            socket=str(self._door.path),
            model=model,
            engine=str(self._engine),
            dtype=config.dtype,
            batch=config.max_supported_batch_size,
            capacity=config.max_kv_cache_capacity,
            **({"chosen": ready.facts["chosen"]} if "chosen" in ready.facts else {}),
        )

    async def _executor_lost(self, reason: str) -> None:
        await self._to_scheduler_control.send(ExecutorLost(reason), _SEND_TIMEOUT_S)
        self._enter(self._life.lost(reason))

    def _enter(self, life: Life) -> None:
        if life != self._life:
            self._life = life
            self._door.tell(life=life)
            tell_state(life)

    def _make_door(self) -> FrontDoor:
        inbox: Receiver[DoorMessage] = Receiver(self._context, [DOOR], DoorMessage, WORK_LIMIT)
        return FrontDoor(
            wiring.door_settings(self._settings),
            inbox=self._opened.enter_context(inbox),
            to_tokenizer=self._sender(TOKENIZER),
            to_scheduler=self._sender(SCHEDULER),
            to_scheduler_control=self._to_scheduler_control,
            facts=wiring.door_facts(self._settings, self._engine.name, self._config, {}),
            listeners=self._listeners(),
            on_step=self._metrics.gaps.step,
        )

    def _listeners(self) -> list[Listener]:
        listeners: list[Listener] = [self._metrics.requests.record, self._history.add]
        if self._settings.traces == "otlp":
            spans = open_spans(self._engine.name)
            self._opened.callback(spans.close)
            listeners.append(spans.add)
        return listeners

    def _open_control(self) -> ControlServer | None:
        try:
            path = control_path(self._door.path)
            overview = Overview(
                self._door,
                self._history,
                look=self._look,
                executor=lambda: self._supervisor.pid,
            )
            handlers: dict[type[ControlRequest], Handler] = {
                Reload: self._reload,
                Metrics: self._tell_metrics,
                Trace: self._history.answer,
                Top: overview.answer,
                CancelRequest: overview.cancel,
            }
            server = ControlServer(path, handlers)
        except HearthError as error:
            _log.warning("there is no control socket", reason=error.message)
            return None
        self._opened.callback(server.close)
        return server

    async def _tell_metrics(self, asked: Metrics) -> MetricsText:
        form: Form = OPENMETRICS if asked.openmetrics else "text/plain"
        return MetricsText((await self._metrics.expose(form)).page.decode())

    async def _look(self) -> Look:
        door = self._door
        return Look(
            state=door.state.life.state,
            clients=door.clients,
            totals=door.state.totals,
            refusals=door.state.refusals,
            load=await door.load(),
            executor=door.state.metrics,
            silent_s=self._supervisor.silent_s,
            restarts=self._supervisor.restarts,
            lost_lines=self._log.all_lost,
            free=available_memory(),
        )

    async def _reload(self, _asked: Reload) -> Reloaded:
        return Reloaded([], [])

    def _make_supervisor(self) -> Supervisor:
        plan = wiring.executor_plan(self._settings, self._engine)
        endpoint = self._sockets.supervisor(plan.role)
        inbox: Receiver[SupervisorMessage] = Receiver(
            self._context, [endpoint], SupervisorMessage, CONTROL_LIMIT
        )
        return Supervisor(
            plan,
            context=self._context,
            sockets=self._sockets,
            inbox=self._opened.enter_context(inbox),
            listeners=Listeners(
                loading=lambda stage, share: self._enter(self._life.loading(stage, share)),
                ready=self._executor_ready,
                lost=self._executor_lost,
                restarting=lambda reason: self._enter(self._life.lost(reason)),
                metrics=lambda metrics: self._door.tell(metrics=metrics),
            ),
        )

    def _sender(self, endpoint: str) -> Sender[Any]:
        limit = CONTROL_LIMIT if endpoint == SCHEDULER_CONTROL else WORK_LIMIT
        sender: Sender[Any] = Sender(self._context, endpoint, limit)
        return self._opened.enter_context(sender)


async def _lose_patience(
    signals: AsyncIterator[signal.Signals], patience: anyio.CancelScope
) -> None:
    await anext(signals)
    patience.cancel()


def _stop_signals() -> list[signal.Signals]:
    """Those that ask for a stop; a terminal that closes is none where nohup(1) has said so."""
    asked = [signal.SIGTERM, signal.SIGINT]
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*asked, signal.SIGHUP]


def _reason(error: BaseException) -> HearthError:
    """The HearthError among what a part raised; anything else is logged and becomes `internal`."""
    known = _find(error)
    if known is not None:
        return known
    _log.error("a part of the daemon failed", exc_info=error)
    return HearthError("internal", "the daemon failed, its log tells why: start it again")


def _find(error: BaseException) -> HearthError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := _find(one))), None)
    return error if isinstance(error, HearthError) else None
