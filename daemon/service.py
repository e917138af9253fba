"""The daemon's process: front door, tokenizer, scheduler and supervisor in one event loop."""

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import structlog
import zmq
from msgspec import structs

from actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from actors.load_scheduler import make_scheduler
from actors.load_tokenizer import make_tokenizer
from actors.logs import configure_logging
from actors.mailbox import Receiver, Sender, ZmqContext
from actors.messages import (
    DoorMessage,
    SchedulerControl,
    SchedulerMessage,
    SupervisorMessage,
    TokenizerMessage,
)
from actors.private_folder import private_folder
from daemon import wiring
from daemon.configuration.settings import Settings
from daemon.door.front_door import FrontDoor
from daemon.mail import Mail
from daemon.notify import notify
from daemon.open_files import make_room
from daemon.supervision.supervisor import Supervisor
from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.deployment import load_deployment
from runtime.errors import HearthError

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

STOPPED = 0
FAILED = 1
FORCED = 130
_SWITCH_S = 0.0005
_log = structlog.get_logger("hearth")

Work = Callable[[], Awaitable[None]]


def serve(settings: Settings, engine: Path) -> int:
    """Serve the engine folder until told to stop.

    Returns the exit code: 0 after a clean stop, 1 after a failure, which is logged, and 130 when
    a second signal did not wait for the stop.
    """
    configure_logging(settings.log_level, settings.log_format)
    if settings.placement_executor == "shared":
        # Else a step in Python keeps the event loop waiting for 5 ms at a time.
        sys.setswitchinterval(_SWITCH_S)
    try:
        make_room(settings.clients)
        # The executor checks the digests.
        options = structs.replace(wiring.runtime_options(settings), verify=False)
        deployment = load_deployment(engine, options)
        config = deployment.base
        with private_folder() as sockets, zmq.Context() as context:
            return anyio.run(
                _run,
                settings,
                engine,
                config,
                context,
                sockets,
                backend_options={"use_uvloop": True},
            )
    except HearthError as error:
        _log.error(error.message, code=error.code, field=error.field)
        return FAILED


async def _run(
    settings: Settings,
    engine: Path,
    config: LLMEngineRunnerConfig,
    context: ZmqContext,
    sockets: Path,
) -> int:
    with ExitStack() as opened:
        book = wiring.address_book(settings, sockets)
        service = Service(settings, engine, config, Mail(context, book, opened))
        return await service.run()


class Service:
    """All that runs in the daemon's process; the constructor takes the socket at once."""

    def __init__(
        self, settings: Settings, engine: Path, config: LLMEngineRunnerConfig, mail: Mail
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._config = config
        self._mail = mail
        self._door = self._make_door()
        mail.opened.callback(self._door.close)
        self._supervisor = self._make_supervisor()
        self._everything = anyio.CancelScope()
        self._asked_to_stop = anyio.Event()
        self._forced = False
        self._error: HearthError | None = None

    async def run(self) -> int:
        """Serve until a signal; raises the HearthError of a part that cannot go on."""
        works = list(self._works())
        with self._everything:
            async with anyio.create_task_group() as tasks:
                for work in works:
                    tasks.start_soon(self._guard, work)
        if self._error is not None:
            raise self._error
        _log.info("stopped")
        return FORCED if self._forced else STOPPED

    def _works(self) -> Iterator[Work]:
        book, context = self._mail.book, self._mail.context
        if book.placement.tokenizer == "shared":
            yield make_tokenizer(wiring.tokenizer_role(book, self._engine), context).run
        if book.placement.scheduler == "shared":
            yield make_scheduler(wiring.scheduler_role(book, self._settings), context).run
        yield self._door.run
        yield self._keep_actors
        yield self._obey_signals
        yield self._stop_when_asked

    async def _guard(self, work: Work) -> None:
        """Run one part; when it fails, note why and end all parts."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - logged, and the exit code tells of it
            self._error = self._error or _reason(error)
            self._everything.cancel()

    async def _keep_actors(self) -> None:
        await self._supervisor.run()
        self._everything.cancel()

    async def _obey_signals(self) -> None:
        with anyio.open_signal_receiver(*_stop_signals()) as signals:
            async for number in signals:
                if self._asked_to_stop.is_set():
                    self._forced = True
                    self._everything.cancel()
                _log.info("stopping", signal=signal.Signals(number).name, forced=self._forced)
                self._asked_to_stop.set()

    async def _stop_when_asked(self) -> None:
        await self._asked_to_stop.wait()
        notify("STOPPING=1")
        await self._door.stop(self._settings.drain_s)
        self._supervisor.stop()

    def _make_door(self) -> FrontDoor:
        mail, here = self._mail, self._mail.here
        inbox: Receiver[DoorMessage] = mail.bind("door", DoorMessage, WORK_LIMIT)
        to_tokenizer: Sender[TokenizerMessage] = mail.connect(here.tokenizer, WORK_LIMIT)
        to_scheduler: Sender[SchedulerMessage] = mail.connect(here.scheduler, WORK_LIMIT)
        to_scheduler_control: Sender[SchedulerControl] = mail.connect(
            here.scheduler_control, CONTROL_LIMIT
        )
        return FrontDoor(
            wiring.door_settings(self._settings),
            inbox=inbox,
            to_tokenizer=to_tokenizer,
            to_scheduler=to_scheduler,
            to_scheduler_control=to_scheduler_control,
            facts=wiring.door_facts(self._settings, self._engine.name, self._config, {}),
        )

    def _make_supervisor(self) -> Supervisor:
        mail = self._mail
        inbox: Receiver[SupervisorMessage] = mail.bind(
            "supervisor", SupervisorMessage, CONTROL_LIMIT
        )
        return Supervisor(
            wiring.plans(mail.book, self._settings, self._engine),
            context=mail.context,
            inbox=inbox,
            to_scheduler_control=mail.connect(mail.here.scheduler_control, CONTROL_LIMIT),
            deadlines=wiring.deadlines(self._settings),
            on_change=self._tell_readiness,
            on_metrics=lambda metrics: self._door.tell(metrics=metrics),
            log_level=self._settings.log_level,
            log_format=self._settings.log_format,
        )

    def _tell_readiness(self, ready: bool) -> None:  # noqa: FBT001 - the supervisor's callback
        if self._asked_to_stop.is_set():
            return
        if not ready:
            self._door.tell(state="starting")
            return
        engine, limits = self._supervisor.facts, self._supervisor.limits
        model = self._engine.name
        # What fits into the memory that was free is for the executor to know.
        config = self._config if limits is None else wiring.within(self._config, limits)
        facts = wiring.door_facts(self._settings, model, config, engine)
        self._door.tell(state="ready", facts=facts)
        notify("READY=1")
        _log.info(
            "ready",
            socket=str(self._door.path),
            model=model,
            engine=str(self._engine),
            dtype=config.dtype,
            batch=config.max_supported_batch_size,
            capacity=config.max_kv_cache_capacity,
            **({"chosen": engine["chosen"]} if "chosen" in engine else {}),
        )


def _stop_signals() -> list[signal.Signals]:
    """Those that ask for a stop; a terminal that closes is none where nohup(1) has said so."""
    asked = [signal.SIGTERM, signal.SIGINT]
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*asked, signal.SIGHUP]


def _reason(error: Exception) -> HearthError:
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
