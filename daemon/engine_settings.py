"""Whether an engine folder can be served as settings say, at a start and before a reload."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from daemon.configuration.settings import Settings
from daemon.shipped import engine_folder, same_engine
from daemon.supervision.file_watch import WatchedFile
from daemon.wiring import runtime_options
from runtime.config import config_file, load_config
from runtime.decoding.deployment import DeploymentConfig, load_deployment
from runtime.engine_folder import DRAFT_FOLDER, engine_identity
from runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER, load_vision_config

_MAPPED = (".safetensors", ".onnx", ".data", ".plan")
"""Names of files with weights end like this; others are read once."""


def deployment_of(settings: Settings, engine: Path) -> DeploymentConfig:
    """What of an engine folder is served; raises what a start is refused for.

    Digests are left to the executor, which checks them.
    """
    return load_deployment(engine, structs.replace(runtime_options(settings), verify=False))


class EngineFiles(NamedTuple):
    """What the actors read and map of an engine folder; `own` are external weights of its own.

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
    if "simulated" in (settings.engine_kind, config.backend):
        return EngineFiles(identity)
    names = config.files.keys() - set(config.external_weight_files)
    decoders = [*_files(engine, [*names, config_file(config)])]
    if config.enable_eagle_spec_decode:
        draft = load_config(engine / DRAFT_FOLDER)
        decoders += _files(engine / DRAFT_FOLDER, [*draft.files, config_file(draft)])
    seen = [] if tower is None else [*tower.files, VISION_CONFIG_FILE]
    towers = tuple(_files(engine / VISION_FOLDER, seen))
    # On a CPU the encoder runs the tower: the executor compares its files, no more.
    device = config.device if settings.device == "auto" else settings.device
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
