"""Plans of the actors that supervisors keep: the settings that each gets at its start."""

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
from hearth.daemon.supervision.file_watch import WatchedFile
from hearth.daemon.supervision.supervisor import ActorPlan
from hearth.daemon.vision_memory import VisionMemory
from hearth.runtime.errors import HearthError

_ALWAYS = sys.maxsize
"""Restarts in a row."""


def executor_plan(
    settings: Settings,
    engine: Path,
    epoch: str = "",
    vision_memory: VisionMemory | None = None,
    files: tuple[WatchedFile, ...] = (),
    *,
    identity: str = "",
) -> ActorPlan:
    """The executor as its supervisor keeps it; its paths do not depend on the working folder."""
    given = ExecutorSettings(
        engine=str(engine.absolute()),
        options=runtime_options(settings),
        identity=identity,
        patches=vision_memory and vision_memory.patches.shared,
        embeddings=vision_memory and vision_memory.embeddings.shared,
    )
    return _plan("executor", given, settings, epoch, vision_memory)._replace(files=files)


def encoder_plan(
    settings: Settings,
    engine: Path,
    epoch: str,
    vision_memory: VisionMemory,
    files: tuple[WatchedFile, ...] = (),
    *,
    identity: str = "",
) -> ActorPlan:
    """The encoder likewise; however often it is lost, requests of text alone go on."""
    given = EncoderSettings(
        engine=str(engine.absolute()),
        options=runtime_options(settings),
        identity=identity,
        pictures=vision_memory.pictures.shared,
        patches=vision_memory.patches.shared,
        embeddings=vision_memory.embeddings.shared,
        own=settings.encoder,
    )
    kept = structs.replace(settings.supervision, restart_limit=_ALWAYS)
    plan = _plan("encoder", given, settings, epoch, vision_memory)
    return plan._replace(supervision=kept, files=files)


def _plan(
    role: str,
    given: msgspec.Struct,
    settings: Settings,
    epoch: str,
    vision_memory: VisionMemory | None,
) -> ActorPlan:
    return ActorPlan(
        role,
        given,
        settings.supervision,
        logs=settings.logs,
        epoch=epoch,
        descriptors=vision_memory.descriptors if vision_memory else (),
    )


def executor_ready(ready: ActorReady, addresses: Addresses) -> ExecutorReady:
    """Message to the scheduler about an executor that can work."""
    if ready.limits is None:
        raise HearthError("internal", "the executor did not tell its limits", "limits")
    return ExecutorReady(addresses.incarnation, addresses.work, ready.limits)
