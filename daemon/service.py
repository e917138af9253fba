"""The daemon's process: front door, tokenizer, scheduler and supervisor in one event loop."""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import structlog
import zmq
from msgspec import structs

from hearth.actors.addresses import (
    CONTROL_LIMIT,
    DOOR,
    SCHEDULER,
    SCHEDULER_CONTROL,
    TOKENIZER,
    WORK_LIMIT,
    Addresses,
    SocketFolder,
    private_folder,
)
from hearth.actors.logs import Log, certain_log, configure_logging, set_level
from hearth.actors.mailbox import Receiver, Sender, ZmqContext
from hearth.actors.messages import (
    AdapterGone,
    DoorMessage,
    EncoderLost,
    EncoderReady,
    ExecutorLost,
    SchedulerControl,
    TokenizerMessage,
)
from hearth.actors.scheduler.actor import SchedulerActor, open_scheduler
from hearth.actors.supervisor_messages import ActorReady, SupervisorMessage
from hearth.actors.tokenizer.actor import TokenizerActor, open_tokenizer
from hearth.daemon.adapters import open_adapters
from hearth.daemon.configuration.settings import SETTINGS, Settings, replaced
from hearth.daemon.connections import StreamServer
from hearth.daemon.control.messages import Reload, Reloaded, control_path
from hearth.daemon.control.server import ControlServer
from hearth.daemon.door.front_door import FrontDoor
from hearth.daemon.door.keys import keys_of
from hearth.daemon.door.state import DoorFacts, door_facts, reply_facts, within
from hearth.daemon.engine_settings import (
    check_settings,
    deployment_of,
    encoder_plan,
    engine_files,
    executor_plan,
    executor_ready,
    runtime_options,
    verify_weights,
)
from hearth.daemon.exit_codes import FORCED, STOPPED, exit_code, reason_of
from hearth.daemon.observe.observers import Observers
from hearth.daemon.service_state import ServiceState
from hearth.daemon.signals import SignalRequests, force_stop
from hearth.daemon.supervision.restart_policy import AnnounceHeld
from hearth.daemon.supervision.supervisor import ActorPlan, Listeners, Supervisor
from hearth.daemon.vision_memory import most_tokens, open_vision_memory
from hearth.daemon.watchdog import Watchdog, notify, reloading, tell_state, worst
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import check_identity
from hearth.runtime.errors import HearthError


class Change(NamedTuple):
    """The settings that are to run, and in the settings' order the names of those that differ.

    Those that need a restart are still as they were in `settings`.
    """

    settings: Settings
    changed: list[str]
    needs_restart: list[str]


def change_to(running: Settings, read: Settings) -> Change:
    """Compute the settings after a reload, and which of the changed ones need a restart."""
    differ = [one for one in SETTINGS.values() if one.of(running) != one.of(read)]
    # Weights are made for an engine: those of the next one wait for it.
    waits = "weights" if running.engine != read.engine else ""
    taken = [one for one in differ if one.declared.reloads and one.name != waits]
    settings = replaced(running, **{one.name: one.of(read) for one in taken})
    changed = [one.name for one in taken]
    return Change(settings, changed, [one.name for one in differ if one.name not in changed])


if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

_SEND_TIMEOUT_S = 5.0
_END_S = 15.0
"""Seconds that a stop may take behind its drain: the executor is asked to end, and then killed."""
_log = structlog.get_logger("hearth")


def serve(
    settings: Settings,
    engine: Path,
    read: Callable[[], Settings] | None = None,
    send_again: Callable[[], None] = lambda: None,
) -> int:
    """Serve the engine folder until asked to stop; the exit code, as docs/operations.md has them.

    A failure is logged. `read` gives the settings as they are to be after a reload, or raises
    HearthError; without it they stay. `send_again` sends the signals that were held until now,
    when their handlers are there.
    """
    log = configure_logging(settings.logs.log_level, settings.logs.log_format)
    _warn_of(settings)
    try:
        deployment = deployment_of(settings, engine)
        read = read or (lambda: settings)
        main = partial(_serve, settings, engine, deployment.base, send_again, log=log, read=read)
        return anyio.run(main, backend_options={"use_uvloop": True})
    except (HearthError, BaseExceptionGroup) as error:
        reason = reason_of(error)
        tell_state(ServiceState().failed(reason.message))
        _log.error(reason.message, code=reason.code, field=reason.field)
        return exit_code(reason)


def _warn_of(settings: Settings) -> None:
    """Tell of old names, whatever the log level is: the next version does not take them."""
    for reason in settings.warnings:
        certain_log("hearth").warning("settings have other names now", reason=reason)


async def _serve(
    settings: Settings,
    engine: Path,
    config: LLMEngineRunnerConfig,
    send_again: Callable[[], None],
    *,
    log: Log,
    read: Callable[[], Settings],
) -> int:
    with ExitStack() as opened:
        service = Service(settings, engine, config, log=log, read=read, opened=opened)
        return await service.run(send_again)


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
        log: Log,
        read: Callable[[], Settings],
        opened: ExitStack,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._name = config.served_name or engine.name
        self._config = config
        self._read = read
        self._opened = opened
        self._sockets = SocketFolder(opened.enter_context(private_folder()))
        self._context: ZmqContext = opened.enter_context(zmq.Context())
        self._observers = Observers(settings, self._name, config, log=log, opened=opened)
        self._service_state = ServiceState()
        # What fits into the memory that was free is for an executor to know, and its other facts.
        self._fitting = config, dict[str, str | int | float]()
        self._was_ready = False
        self._vision_memory = open_vision_memory(settings, engine, config, opened)
        self._files = engine_files(settings, engine)
        # Of the weights that the executor before served, to say where they are others.
        self._served_digest = ""
        # Who has to be ready before the daemon is, the encoder at the start alone.
        self._awaited = {"executor", "encoder"} if self._vision_memory else {"executor"}
        self._to_scheduler_control: Sender[SchedulerControl] = self._sender(SCHEDULER_CONTROL)
        self._to_tokenizer: Sender[TokenizerMessage] = self._sender(TOKENIZER)
        self._scheduler: SchedulerActor | None = None
        self._tokenizer: TokenizerActor | None = None
        self._keys = keys_of(settings.door.tcp_port, settings.door.keys, os.environ)
        self._adapters = open_adapters(
            settings,
            engine,
            config,
            tell=lambda message: self._supervisors[0].tell(message),  # noqa: PLW0108 - not there yet
            gone=lambda name: self._to_scheduler_control.send(AdapterGone(name), _SEND_TIMEOUT_S),
            served=lambda: self._door.tell(facts=self._facts()),
        )
        self._door = self._make_door()
        opened.callback(self._door.close)
        # Of the executor and, where the model sees, of the encoder.
        listeners = (
            Listeners(
                loading=lambda stage, share: self._enter(self._service_state.loading(stage, share)),
                ready=self._executor_ready,
                lost=self._executor_lost,
                restarting=lambda reason: self._enter(self._service_state.lost(reason)),
                held=self._executor_held,
                metrics=lambda metrics: self._door.tell(metrics=metrics),
                adapter=self._adapters.answered,
            ),
            Listeners(
                ready=self._encoder_ready,
                lost=self._encoder_lost,
                held=lambda held: self._enter(self._service_state.notes(held.error.message)),
            ),
        )
        self._supervisors = [*map(self._supervise, self._plans(settings), listeners)]
        self._servers: list[StreamServer] = [
            *self._observers.open(self._door, self._supervisors),
            *self._open_control(),
        ]
        self._watchdog = Watchdog(
            lambda: worst(one.health for one in self._supervisors),
            lambda: self._settings.supervision.load_timeout_s,
            os.environ,
        )

    async def run(self, send_again: Callable[[], None] = lambda: None) -> int:
        """Serve until a signal; raises the errors that end its parts, alone or in a group.

        `send_again` is called once signals are handled.
        """
        structlog.contextvars.bind_contextvars(epoch=self._door.epoch)
        signal_requests = SignalRequests(os.environ)
        with anyio.open_signal_receiver(*signal_requests.signals) as signals:
            send_again()
            async with anyio.create_task_group() as tasks:
                # Start.
                for part in (*self._open_actors(), self._door):
                    tasks.start_soon(part.run)
                for supervisor in self._supervisors:
                    tasks.start_soon(supervisor.run)
                for server in self._servers:
                    tasks.start_soon(server.run)
                if "NOTIFY_SOCKET" in os.environ:
                    tasks.start_soon(self._watchdog.run)
                # Wait.
                number = await signal_requests.stop(signals, self._reload)
                _log.info("stopping", signal=number.name)
                notify("STOPPING=1")
                self._enter(self._service_state.draining(number.name))
                self._watchdog.stops(self._settings.drain_s + _END_S)
                # Drain, unless a second signal comes.
                with anyio.CancelScope() as patience:
                    tasks.start_soon(force_stop, signal_requests.stop(signals), patience)
                    await self._door.stop(self._settings.drain_s)
                if patience.cancelled_caught:
                    _log.info("stopping at once")
                    self._enter(self._service_state.draining(f"{number.name}, and a second signal"))
                # Stop.
                # Before the door gives up the lock: the next daemon has sockets of these names.
                for server in self._servers:
                    await server.stop()
                await self._door.stop()
                for supervisor in self._supervisors:
                    await supervisor.stop()
                tasks.cancel_scope.cancel()
        # What is still asked for is under way, and no reason for another exit code.
        signal_requests.ignore()
        unfinished = self._door.state.totals["shutting_down"]
        _log.info("stopped", reason=self._service_state.reason, unfinished=unfinished)
        return FORCED if patience.cancelled_caught else STOPPED

    def _open_actors(self) -> tuple[TokenizerActor, SchedulerActor]:
        vision_memory, sockets, context = self._vision_memory, self._sockets, self._context
        self._tokenizer = open_tokenizer(
            context,
            self._engine,
            sockets.tokenizer,
            vision_memory and vision_memory.prompt_images,
            self._settings.reply_format,
        )
        self._limit_images()
        # A client may have been greeted before.
        self._door.tell(facts=self._facts())
        arenas = vision_memory and vision_memory.arenas()
        self._scheduler = open_scheduler(
            context, self._settings.scheduler, arenas, sockets.scheduler
        )
        return self._tokenizer, self._scheduler

    async def _executor_ready(self, ready: ActorReady, addresses: Addresses) -> None:
        told = executor_ready(ready, addresses)
        await self._to_tokenizer.send(told, _SEND_TIMEOUT_S)
        if not self._service_state.serves:
            return
        self._fitting = within(self._config, told.limits), ready.facts
        self._note_weights(str(ready.facts.get("weights_sha256", "")))
        self._adapters.executor_ready(ready.adapters, str(ready.facts.get("weights", "")))
        self._limit_images()
        self._came("executor")

    def _note_weights(self, digest: str) -> None:
        before, self._served_digest = self._served_digest, digest
        if before not in ("", digest):
            _log.warning("other weights are served than before", before=before, now=digest)

    async def _encoder_ready(self, _ready: ActorReady, addresses: Addresses) -> None:
        await self._to_scheduler_control.send(EncoderReady(addresses.work), _SEND_TIMEOUT_S)
        self._enter(self._service_state.notes(""))
        self._came("encoder")

    def _came(self, role: str) -> None:
        """Serve once all are there."""
        self._awaited.discard(role)
        if self._awaited or not self._service_state.serves or self._service_state.state == "ready":
            return
        # What has been made until now stays: looking through it would stall all replies.
        gc.collect()
        gc.freeze()
        self._enter(self._service_state.ready())
        notify("READY=1")
        self._was_ready = True
        self._watchdog.serves()
        config, facts = self._fitting
        certain_log("hearth").info(
            "ready",
            socket=str(self._door.path),
            model=self._name,
            engine=str(self._engine),
            dtype=config.dtype,
            batch=config.max_supported_batch_size,
            capacity=config.max_kv_cache_capacity,
            **({"tcp": f"127.0.0.1:{self._door.tcp_port}"} if self._door.tcp_port else {}),
            **({"chosen": facts["chosen"]} if "chosen" in facts else {}),
            **({"next": f"hearth chat{self._place()}"} if sys.stderr.isatty() else {}),
        )

    def _place(self) -> str:
        """Option by which a command finds this daemon; "" for the agreed socket."""
        return f" --socket {self._door.path}" if self._settings.door.socket else ""

    async def _executor_lost(self, reason: str) -> None:
        self._adapters.executor_lost()
        lost = ExecutorLost(reason, blameless=self._supervisors[0].spoiled)
        await self._to_tokenizer.send(lost, _SEND_TIMEOUT_S)
        self._awaited.add("executor")
        self._enter(self._service_state.lost(reason))

    def _executor_held(self, held: AnnounceHeld) -> None:
        self._enter(self._service_state.held(held.error.message, refuses=held.refuses))
        if not self._supervisors[0].spoiled:
            # The files are at rest and cannot be served: who waits would wait for a person.
            self._door.end_all("weights_invalid", held.error.message)

    async def _encoder_lost(self, reason: str) -> None:
        await self._to_scheduler_control.send(EncoderLost(reason), _SEND_TIMEOUT_S)

    def _limit_images(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.limit_images(most_tokens(self._settings, self._fitting[0]))

    def _enter(self, service_state: ServiceState) -> None:
        if service_state != self._service_state:
            self._service_state = service_state
            self._door.tell(service_state=service_state)
            tell_state(service_state)

    def _make_door(self) -> FrontDoor:
        inbox: Receiver[DoorMessage] = Receiver(self._context, [DOOR], DoorMessage, WORK_LIMIT)
        return FrontDoor(
            self._settings.door,
            self._settings.scheduler,
            inbox=self._opened.enter_context(inbox),
            to_tokenizer=self._to_tokenizer,
            to_scheduler=self._sender(SCHEDULER),
            to_scheduler_control=self._to_scheduler_control,
            facts=self._facts(),
            listeners=self._observers.listeners,
            on_step=self._observers.on_step,
            keys=self._keys,
            pictures=self._vision_memory and self._vision_memory.pictures,
        )

    def _facts(self) -> DoorFacts:
        config, facts = self._fitting
        seen = self._vision_memory.facts if self._vision_memory is not None else {}
        told = door_facts(self._settings.scheduler, self._name, config, facts | seen)
        form = None if self._tokenizer is None else self._tokenizer.reply_format
        return structs.replace(told, adapters=self._adapters.names, **reply_facts(form))

    def _open_control(self) -> list[ControlServer]:
        try:
            path = control_path(self._door.path)
            handlers = {**self._observers.handlers, **self._adapters.handlers}
            server = ControlServer(path, {Reload: self._reload, **handlers})
        except HearthError as error:
            _log.warning("there is no control socket", reason=error.message)
            return []
        self._opened.callback(server.close)
        return [server]

    async def _reload(self, _asked: Reload | None = None) -> Reloaded:
        """Take over what new settings may change, all of it at once, or nothing of it."""
        if not self._service_state.serves:
            raise HearthError("shutting_down", "the daemon stops: the next one reads the settings")
        # Else the manager would take the end of a reload for that of the start.
        with reloading() if self._was_ready else nullcontext():
            try:
                read = self._read()
                check_settings(read, self._settings, self._engine)
                exchanged = self._supervisors[0].differing_files()
                if exchanged:
                    check_identity(self._engine, self._files.identity)
                await verify_weights(read, self._settings, self._engine, exchanged=bool(exchanged))
                own = self._settings.door
                keys = keys_of(own.tcp_port, own.keys, os.environ)
            except HearthError as error:
                _log.error("not reloaded", reason=error.message, code=error.code, field=error.field)
                raise
            _warn_of(read)
            self._settings, changed, needs_restart = change_to(self._settings, read)
            self._adopt(self._settings)
            if exchanged and "weights" not in changed:
                _log.info("files were exchanged", files=exchanged)
                changed.append("weights")
            if "weights" in changed:
                asked = self._supervisors[0].renew("it gets other weights")
                if asked and self._scheduler is not None:
                    self._scheduler.retire_executor()
            if self._keys is not None and keys is not None:
                if keys.clients != self._keys.clients:
                    changed.append("keys")
                if keys.secret != self._keys.secret and "keys" not in needs_restart:
                    needs_restart.append("keys")
                self._keys = replace(self._keys, clients=keys.clients)
                self._door.allow(keys.clients)
            _log.info("reloaded", changed=changed, needs_restart=needs_restart)
            return Reloaded(changed, needs_restart)

    def _adopt(self, settings: Settings) -> None:
        set_level(settings.logs.log_level)
        self._door.adopt(settings.door, settings.scheduler)
        self._door.tell(facts=self._facts())
        if self._scheduler is not None:
            self._scheduler.adopt(settings.scheduler)
        self._limit_images()
        for supervisor, plan in zip(self._supervisors, self._plans(settings), strict=True):
            supervisor.adopt(plan)

    def _plans(self, settings: Settings) -> list[ActorPlan]:
        engine, epoch, vision_memory = self._engine, self._door.epoch, self._vision_memory
        files = self._files.of_executor(runtime_options(settings).weights)
        identity = self._files.identity
        plans = [executor_plan(settings, engine, epoch, vision_memory, files, identity=identity)]
        if vision_memory is None:
            return plans
        # On a GPU the executor has the tower.
        tower = tuple(one for one in self._files.tower if one._replace(mapped=False) in files)
        encoder = encoder_plan(settings, engine, epoch, vision_memory, tower, identity=identity)
        return [*plans, encoder]

    def _supervise(self, plan: ActorPlan, listeners: Listeners) -> Supervisor:
        endpoint = self._sockets.supervisor(plan.role)
        inbox: Receiver[SupervisorMessage] = Receiver(
            self._context, [endpoint], SupervisorMessage, CONTROL_LIMIT
        )
        return Supervisor(
            plan,
            context=self._context,
            sockets=self._sockets,
            inbox=self._opened.enter_context(inbox),
            listeners=listeners,
        )

    def _sender(self, endpoint: str) -> Sender[Any]:
        limit = CONTROL_LIMIT if endpoint == SCHEDULER_CONTROL else WORK_LIMIT
        sender: Sender[Any] = Sender(self._context, endpoint, limit)
        return self._opened.enter_context(sender)
