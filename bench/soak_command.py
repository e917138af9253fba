import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import uvloop

from bench.flatness import Sample, judge
from bench.report import note, print_fields, publish
from bench.soak import Soak
from bench.toy_engine import engine_option, simulated_flags, toy_engine
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from daemon.own_daemon import own_daemon

_SAMPLES_PER_NOTE = 6
_STEP_MS = 1.0


@click.command()
@click.option("--minutes", type=click.FloatRange(0.01), default=30.0, show_default=True)
@click.option(
    "--step-ms",
    type=click.FloatRange(0),
    help=f"Milliseconds a step of the simulated engine.  [{_STEP_MS:g}]",
)
@engine_option("the simulated engine")
@json_option
def soak(minutes: float, step_ms: float | None, engine: Path | None, *, as_json: bool) -> int:
    """Watch the memory of daemon and executor under random requests, a fifth of them cancelled.

    Flat means less than 1 MB per 10,000 requests and no more open handles after the first fifth
    of the run. The exit code is 1 when it is not.
    """
    if engine and step_ms is not None:
        raise click.UsageError("--step-ms is for the simulated engine alone")
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder:
        flags = () if engine else simulated_flags(_STEP_MS if step_ms is None else step_ms)
        with own_daemon(engine or toy_engine(Path(folder)), flags) as daemon:
            run = Soak(daemon.socket, daemon.pid, 60 * minutes)
            uvloop.run(run.run(_progress(run)))
            daemon.stop()
    figures = judge(run.samples, aborted=run.aborted, failed=run.failed)
    title = "Memory of daemon and executor"
    publish(figures, lambda: print_fields(title, figures, ".3f"), as_json=as_json)
    return 0 if figures.flat else FAILED


def _progress(run: Soak) -> Callable[[Sample], None]:
    def say(sample: Sample) -> None:
        if len(run.samples) % _SAMPLES_PER_NOTE == 0:
            note(
                f"{sample.seconds / 60:.1f} min: {sample.requests} requests, "
                f"{sample.rss_bytes / 1e6:.1f} MB, {sample.handles} handles"
            )

    return say
