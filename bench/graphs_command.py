import tempfile
from contextlib import closing
from pathlib import Path

import click

from bench.graphs import HIT_RATE_AIM, GraphFigures, GraphRun
from bench.record import keep_figures, record_option
from bench.report import note, print_fields, publish
from bench.toy_engine import engine_option, toy_engine
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import RuntimeOptions
from runtime.tensors.profiles import decode_batches


@click.command()
@click.option("--batches", type=click.IntRange(1), default=50, show_default=True)
@engine_option("a toy")
@record_option
@json_option
def graphs(batches: int, engine: Path | None, record: Path | None, *, as_json: bool) -> int:
    """Count the decode steps that captured graphs serve, with evictions, cancels and padding.

    The exit code is 1 when they are fewer than 99%.
    """
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder:
        found = _run(engine or toy_engine(Path(folder)), batches)
    title = "Decode steps and captured graphs"
    publish(found, lambda: print_fields(title, found, ".4f"), as_json=as_json)
    keep_figures(record, {"graphs": found}, "graphs")
    if found.hit_rate < HIT_RATE_AIM:
        note(f"fewer than {HIT_RATE_AIM:.0%} of the decode steps came from a graph")
        return FAILED
    return 0


def _run(engine: Path, batches: int) -> GraphFigures:
    with closing(LLMInferenceRuntime.open(engine, RuntimeOptions(verify=False))) as runtime:
        run = GraphRun(runtime, decode_batches(runtime.config))
        with progress_bar() as progress:
            return run.run(batches, lambda done, total: progress("batches", done, total))
