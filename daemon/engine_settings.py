"""Whether an engine folder can be served as settings say, at a start and before a reload."""

from pathlib import Path

from msgspec import structs

from daemon.configuration.settings import Settings
from daemon.shipped import engine_folder, same_engine
from daemon.wiring import runtime_options
from runtime.decoding.deployment import DeploymentConfig, load_deployment


def deployment_of(settings: Settings, engine: Path) -> DeploymentConfig:
    """What of an engine folder is served; raises what a start is refused for.

    Digests are left to the executor, which checks them.
    """
    return load_deployment(engine, structs.replace(runtime_options(settings), verify=False))


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
