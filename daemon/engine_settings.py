"""An engine folder as settings say it is served: its files, checks before that, plans of actors."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from msgspec import structs

from hearth.actors.addresses import Addresses
from hearth.actors.messages import ExecutorReady
from hearth.actors.roles import EncoderSettings, ExecutorSettings
from hearth.actors.supervisor_messages import ActorReady
from hearth.daemon.adapters import adapters_folder
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.shipped import engine_folder, same_engine
from hearth.daemon.supervision.file_watch import WatchedFile
from hearth.daemon.supervision.supervisor import ActorPlan
from hearth.daemon.vision_memory import VisionMemory
from hearth.runtime.config import config_file, load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER, engine_identity
from hearth.runtime.errors import HearthError
from hearth.runtime.files import cache_folder
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER, load_vision_config
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager

_MAPPED = (".safetensors", ".onnx", ".data", ".plan")
"""Names of files with weights end like this; others are read once."""


def runtime_options(settings: Settings) -> RuntimeOptions:
    """The runtime's section with what follows from others, and absolute paths.

    Raises `invalid_value` for a second tier behind a prefix cache that is not there.
    """
    own = settings.runtime
    for name in ("prefix_host_bytes", "prefix_disk_bytes"):
        if getattr(own, name) and not own.prefix_cache_bytes:
            what = f"{name} is for what finds no room in prefix_cache_bytes, which is 0"
            raise HearthError("invalid_value", what, name)
    folder = str(Path(own.prefix_folder or cache_folder() / "prefix").absolute())
    return structs.replace(
        own,
        image_memory=settings.door.images_in_flight_bytes + settings.encoder.image_cache_bytes,
        prefix_folder=folder if own.prefix_disk_bytes else "",
        adapters=str(adapters_folder(own.adapters, os.environ)),
        weights=str(Path(own.weights).absolute()) if own.weights else "",
    )


def deployment_of(settings: Settings, engine: Path) -> DeploymentConfig:
    """Load the deployment of an engine folder; raises the error that refuses a start.

    Digests are left to the executor, which checks them.
    """
    return load_deployment(engine, structs.replace(runtime_options(settings), verify=False))


class EngineFiles(NamedTuple):
    """Files of an engine folder that actors read and map; `own` are external weights of its own.

    `identity` is of what this process has read of it (`engine_identity`).
    """

    identity: str = ""
    decoders: tuple[WatchedFile, ...] = ()
    own: tuple[WatchedFile, ...] = ()
    tower: tuple[WatchedFile, ...] = ()

    def of_executor(self, weights: str) -> tuple[WatchedFile, ...]:
        """The executor's, where it serves other `weights` than the folder's own, or ""."""
        served = (WatchedFile(weights),) if weights else self.own
        return (*served, *self.decoders) if self.decoders else ()


def engine_files(settings: Settings, engine: Path) -> EngineFiles:
    """The files of an engine folder; none of a simulated engine, which maps none."""
    config, tower = load_config(engine), load_vision_config(engine)
    identity = engine_identity(engine)
    if "simulated" in (settings.runtime.engine_kind, config.backend):
        return EngineFiles(identity)
    names = config.files.keys() - set(config.external_weight_files)
    decoders = [*_files(engine, [*names, config_file(config)])]
    if config.enable_eagle_spec_decode:
        draft = load_config(engine / DRAFT_FOLDER)
        decoders += _files(engine / DRAFT_FOLDER, [*draft.files, config_file(draft)])
    seen = [] if tower is None else [*tower.files, VISION_CONFIG_FILE]
    towers = tuple(_files(engine / VISION_FOLDER, seen))
    # On a CPU the encoder runs the tower: the executor compares its files, no more.
    asked = settings.runtime.device
    device = config.device if asked == "auto" else asked
    decoders += (one._replace(mapped=one.mapped and device == "cuda") for one in towers)
    own = tuple(_files(engine, config.external_weight_files))
    return EngineFiles(identity, tuple(decoders), own, towers)


def _files(folder: Path, names: Iterable[str]) -> Iterator[WatchedFile]:
    # Absolute, as the actors' own path is.
    for name in names:
        yield WatchedFile(str(folder.absolute() / name), mapped=name.endswith(_MAPPED))


def check_settings(read: Settings, running: Settings, engine: Path) -> None:
    """Refuse what a start would, which may come any time from now on.

    `engine` is the folder that is served by the settings that run.
    """
    if same_engine(read, running):
        deployment_of(read, engine)
    elif read.engine:
        deployment_of(read, engine_folder(read.engine))
    else:
        # The shipped model's engine may have to be built first.
        runtime_options(read)


async def verify_weights(
    read: Settings, running: Settings, engine: Path, *, exchanged: bool = False
) -> None:
    """Compare every byte of weights that are to be served from now on with their digest.

    Where files that are served were `exchanged` all of the engine's are compared. Who waits for an
    answer meanwhile is not held up. Raises `weights_invalid` and `engine_corrupt`.
    """
    options, same = runtime_options(read), runtime_options(running).weights
    if not options.verify or read.engine != running.engine:
        return
    if exchanged:
        await anyio.to_thread.run_sync(load_deployment, engine, options)
        return
    if options.weights in {"", same}:
        return
    weights = ExternalWeightManager.open(engine, load_config(engine), options.weights)
    if weights is not None:
        await anyio.to_thread.run_sync(weights.verify)


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
