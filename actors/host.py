from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

import msgspec
import structlog
import zmq

from actors.addresses import CONTROL_LIMIT
from actors.loaded import Loaded
from actors.logs import configure_logging
from actors.mailbox import Sender, ZmqContext
from actors.messages import ActorFailed, ActorHello, ActorReady, SupervisorMessage
from actors.roles import AnyRole, ExecutorRole, HostConfig, SchedulerRole
from runtime.errors import HearthError

_FLUSH_S = 2.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_log = structlog.get_logger("host")


def run_actor(name: str, role: AnyRole, context: ZmqContext, *, own_process: bool) -> None:
    """Say hello, load, say ready, work; a failure is told to the supervisor and raised."""
    to_supervisor: Sender[SupervisorMessage] = Sender(
        context, role.addresses.supervisor, CONTROL_LIMIT, _FLUSH_S
    )
    with to_supervisor:
        try:
            to_supervisor.post(ActorHello(name, os.getpid()))
            loaded = _load(name, role, context, to_supervisor)
            if own_process and loaded.stop is not None:
                _on_terminate(loaded)
            to_supervisor.post(ActorReady(name, os.getpid(), dict(loaded.facts), loaded.limits))
            loaded.run()
        except HearthError as error:
            to_supervisor.post(ActorFailed(name, error.code, error.message, error.field))
            raise
        except Exception:
            to_supervisor.post(ActorFailed(name, "internal", f"{name} failed: its log tells why"))
            raise


def main(arguments: list[str]) -> int:
    """Be the actor that the one argument (a HostConfig as JSON) describes; the exit status."""
    try:
        config = msgspec.json.decode(arguments[0], type=HostConfig)
    except (IndexError, msgspec.MsgspecError):
        sys.stderr.write("actors.host takes one HostConfig as JSON: it is started by the daemon\n")
        return 2
    _die_with(config.parent)
    os.chdir(config.folder)
    # Ctrl-C and the end of a terminal reach the whole group of processes; the daemon decides
    # when its actors end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    configure_logging(config.log_level, config.log_format)
    with zmq.Context() as context:
        return _run(config, context)


def _run(config: HostConfig, context: ZmqContext) -> int:
    try:
        run_actor(config.name, config.role, context, own_process=True)
    except HearthError as error:
        _log.error("actor failed", actor=config.name, code=error.code, reason=error.message)
        return 1
    except Exception:  # noqa: BLE001 - logged; the exit status tells the supervisor
        _log.exception("actor failed", actor=config.name)
        return 1
    return 0


def _load(
    name: str, role: AnyRole, context: ZmqContext, to_supervisor: Sender[SupervisorMessage]
) -> Loaded:
    # Each process imports what its own actor needs, and no other's libraries.
    if isinstance(role, ExecutorRole):
        from actors.open_executor import open_executor  # noqa: PLC0415

        return open_executor(role, name, context, to_supervisor)
    if isinstance(role, SchedulerRole):
        from actors.load_scheduler import load_scheduler  # noqa: PLC0415

        return load_scheduler(role, name, context, to_supervisor)
    from actors.load_tokenizer import load_tokenizer  # noqa: PLC0415

    return load_tokenizer(role, name, context, to_supervisor)


def _on_terminate(loaded: Loaded) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        if loaded.stop is not None:
            loaded.stop()

    signal.signal(signal.SIGTERM, stop)


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _die_with(parent: int) -> None:
    """Be killed when the daemon dies, so that no actor keeps the device after it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
