"""Other weights for a daemon that serves: whether the next executor will be able to take them."""

from pathlib import Path

import anyio

from daemon.configuration.settings import Settings
from daemon.wiring import runtime_options
from runtime.config import load_config
from runtime.decoding.deployment import load_deployment
from runtime.weights.external_weight_manager import ExternalWeightManager


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
