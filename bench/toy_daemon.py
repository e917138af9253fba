"""Parts that benches of the daemon share: a toy engine, flags for a daemon, connected clients."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from hearth_client import AsyncClient

_CAPACITY = 2048
NO_REUSE = ("--prefix-cache-bytes", "0")
"""Flags without reuse of prompts, for a bench that times repeated ones or sends each once."""


def engine_option(stand_in: str) -> Callable[[Any], Any]:
    """The option `--engine DIR` of a bench that otherwise takes `stand_in`."""
    return click.option(
        "--engine",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help=f"A real engine folder in place of {stand_in}.",
    )


def simulated_flags(step_ms: float, prefill_us: float = 0.0) -> tuple[str, ...]:
    """The flags of `hearth serve` for a simulated engine of `step_ms` milliseconds a step.

    Each token of a prefill takes `prefill_us` microseconds more.
    """
    times = ("--step-ms", str(step_ms), "--prefill-us", str(prefill_us))
    return ("--engine-kind", "simulated", *times, "--log-level", "warning")


@contextmanager
def given_or_toy(engine: Path | None = None, max_lora_rank: int = 0) -> Iterator[Path]:
    """The engine folder that was given, or a toy for as long as the context lasts.

    The toy takes adapters up to `max_lora_rank`.
    """
    if engine is not None:
        yield engine
        return
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder:
        yield toy_engine(Path(folder), max_lora_rank)


def toy_engine(folder: Path, max_lora_rank: int = 0, layers: int = 2) -> Path:
    """Make an engine folder in `folder` whose vocabulary and limits a simulated engine takes."""
    # A client process of `bench load` has no use for these, and waits for no import of them.
    from hearth.bench.random_model import QUICK_SHAPE, write_random_model  # noqa: PLC0415 - said above
    from hearth.runtime.export import ExportOptions, export_model  # noqa: PLC0415 - likewise

    source, engine = folder / "toy", folder / "toy-engine"
    write_random_model(source, msgspec.structs.replace(QUICK_SHAPE, layers=layers))
    options = ExportOptions(capacity=_CAPACITY, max_lora_rank=max_lora_rank)
    export_model(source, engine, options)
    return engine


@asynccontextmanager
async def connected(socket: Path | str, count: int) -> AsyncIterator[list[AsyncClient]]:
    """`count` clients of the daemon at `socket`, each with a connection of its own."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AsyncClient(socket)) for _ in range(count)]
