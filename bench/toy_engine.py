"""What a daemon with the simulated engine needs: flags, and an engine folder to stand in for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bench.random_model import QUICK_SHAPE, write_random_model
from runtime.export import ExportOptions, export_model

_CAPACITY = 2048


def engine_option(stand_in: str) -> Callable[[Any], Any]:
    """The option `--engine DIR` of a bench that otherwise takes `stand_in`."""
    return click.option(
        "--engine",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help=f"A real engine folder in place of {stand_in}.",
    )


def simulated_flags(step_ms: float) -> tuple[str, ...]:
    """The flags of `hearth serve` for a simulated engine of `step_ms` milliseconds a step."""
    return ("--engine-kind", "simulated", "--step-ms", str(step_ms), "--log-level", "warning")


def toy_engine(folder: Path) -> Path:
    """Make an engine folder in `folder` whose vocabulary and limits a simulated engine takes."""
    source, engine = folder / "toy", folder / "toy-engine"
    write_random_model(source, QUICK_SHAPE)
    export_model(source, engine, ExportOptions(capacity=_CAPACITY))
    return engine
