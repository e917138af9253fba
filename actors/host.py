"""The process of one actor: `python -m hearth.actors.host CONFIG`, started by the daemon alone."""

from __future__ import annotations

import os
import sys

import msgspec
import structlog
import zmq

from hearth.actors.addresses import CONTROL_LIMIT
from hearth.actors.logs import configure_logging
from hearth.actors.mailbox import Sender, ZmqContext
from hearth.actors.own_process import die_first, die_with, ignore_signals
from hearth.actors.roles import (
    EncoderSettings,
    ExecutorSettings,
    Host,
    HostConfig,
    ReadyActor,
    Role,
)
from hearth.actors.supervisor_messages import ActorFailed, ActorHello, ActorReady, SupervisorMessage
from hearth.runtime.errors import HearthError

_FLUSH_S = 2.0
_log = structlog.get_logger("host")


def _executor(host: Host, settings: ExecutorSettings) -> ReadyActor:
    from hearth.actors.executor.open import open_executor  # noqa: PLC0415 - see Role

    return open_executor(host, settings)


def _encoder(host: Host, settings: EncoderSettings) -> ReadyActor:
    from hearth.actors.encoder.actor import open_encoder  # noqa: PLC0415 - see Role

    return open_encoder(host, settings)


ROLES: dict[str, Role] = {
    "executor": Role(ExecutorSettings, _executor),
    "encoder": Role(EncoderSettings, _encoder),
}
"""Actors that can have a process of their own."""


def _ready(name: str, ready: ReadyActor) -> ActorReady:
    return ActorReady(name, os.getpid(), dict(ready.facts), ready.limits, dict(ready.adapters))


def run_actor(config: HostConfig, context: ZmqContext) -> None:
    """Report hello, load, report ready, run; a failure is reported to the supervisor and raised."""
    name, pid = config.name, os.getpid()
    to_supervisor: Sender[SupervisorMessage] = Sender(
        context, config.addresses.supervisor, CONTROL_LIMIT, _FLUSH_S
    )
    with to_supervisor:
        try:
            to_supervisor.post(ActorHello(name, pid))
            role = ROLES[config.role]
            settings = msgspec.json.decode(config.settings, type=role.settings)
            ready = role.prepare(Host(name, config.addresses, context, to_supervisor), settings)
            to_supervisor.post(_ready(name, ready))
            ready.run()
        except HearthError as error:
            to_supervisor.post(ActorFailed(name, error.code, error.message, error.field))
            raise
        except Exception:
            to_supervisor.post(ActorFailed(name, "internal", f"{name} failed: its log tells why"))
            raise


def main(arguments: list[str]) -> int:
    """Run the actor that the one argument (a HostConfig as JSON) describes; the exit status."""
    try:
        config = msgspec.json.decode(arguments[0], type=HostConfig)
    except (IndexError, msgspec.MsgspecError):
        sys.stderr.write(
            "hearth.actors.host takes one HostConfig as JSON: it is started by the daemon\n"
        )
        return 2
    # The daemon decides when its actors end, by their control inbox or by force.
    ignore_signals()
    die_with(config.parent)
    die_first()
    configure_logging(config.logs.log_level, config.logs.log_format)
    structlog.contextvars.bind_contextvars(epoch=config.epoch)
    try:
        with zmq.Context() as context:
            run_actor(config, context)
    except HearthError as error:
        # Reported to the supervisor, which logs it.
        _log.debug("actor failed", actor=config.name, code=error.code, reason=error.message)
        return 1
    except Exception:  # noqa: BLE001 - logged; the exit status tells the supervisor
        _log.exception("actor failed", actor=config.name)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
