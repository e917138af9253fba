"""The actors that supervisors keep: what each is told when it starts, and when it is ready."""

import sys
from pathlib import Path

import msgspec
from msgspec import structs

from hearth.actors.addresses import Addresses
from hearth.actors.messages import ExecutorReady
from hearth.actors.roles import EncoderSettings, ExecutorSettings
from hearth.actors.supervisor_messages import ActorReady
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.engine_settings import runtime_options
from hearth.daemon.sight import Sight
from hearth.daemon.supervision.file_watch import WatchedFile
from hearth.daemon.supervision.supervisor import ActorPlan
from hearth.runtime.errors import HearthError

_ALWAYS = sys.maxsize
"""Restarts in a row."""


def executor_plan(
    settings: Settings,
    engine: Path,
    epoch: str = "",
    sight: Sight | None = None,
    files: tuple[WatchedFile, ...] = (),
    *,
    identity: str = "",
) -> ActorPlan:
    """The executor as its supervisor keeps it; its paths do not depend on the working folder."""
    given = ExecutorSettings(
        engine=str(engine.absolute()),
        options=runtime_options(settings),
        identity=identity,
        patches=sight and sight.patches.shared,
        embeddings=sight and sight.embeddings.shared,
    )
    return _plan("executor", given, settings, epoch, sight)._replace(files=files)


def encoder_plan(
    settings: Settings,
    engine: Path,
    epoch: str,
    sight: Sight,
    files: tuple[WatchedFile, ...] = (),
    *,
    identity: str = "",
) -> ActorPlan:
    """The encoder likewise; however often it is lost, requests of text alone go on."""
    given = EncoderSettings(
        engine=str(engine.absolute()),
        options=runtime_options(settings),
        identity=identity,
        pictures=sight.pictures.shared,
        patches=sight.patches.shared,
        embeddings=sight.embeddings.shared,
        own=settings.encoder,
    )
    kept = structs.replace(settings.supervision, restart_limit=_ALWAYS)
    plan = _plan("encoder", given, settings, epoch, sight)
    return plan._replace(supervision=kept, files=files)


def _plan(
    role: str, given: msgspec.Struct, settings: Settings, epoch: str, sight: Sight | None
) -> ActorPlan:
    return ActorPlan(
        role,
        given,
        settings.supervision,
        logs=settings.logs,
        epoch=epoch,
        descriptors=sight.descriptors if sight else (),
    )


def executor_ready(ready: ActorReady, addresses: Addresses) -> ExecutorReady:
    """What the scheduler is told of an executor that can work."""
    if ready.limits is None:
        raise HearthError("internal", "the executor did not tell its limits", "limits")
    return ExecutorReady(addresses.incarnation, addresses.work, ready.limits)
