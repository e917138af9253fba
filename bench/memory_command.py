import tempfile
from pathlib import Path

import click

from bench.memory import MemoryFigures, measure_memory
from bench.record import keep_figures, record_option
from bench.report import figure, log_folder, note, print_table, publish
from bench.toy_engine import engine_option, toy_engine
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option

_COLUMNS = ("part", "predicted MB", "measured MB", "ratio")


@click.command()
@engine_option("a toy")
@click.option(
    "--name",
    default="",
    metavar="NAME",
    help="The key of these figures in a record.  [memory]",
)
@record_option
@json_option
def memory(engine: Path | None, name: str, record: Path | None, *, as_json: bool) -> int:
    """Compare the memory that hearth check predicts with what an engine takes, part by part.

    On a GPU by its free memory, where nobody else may work meanwhile, and the exit code is 1 when
    the sum is off by more than 5%; on the CPU by resident memory, which depends on what is used.
    """
    if name and record is None:
        raise click.UsageError("--name is for --record")
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder:
        found = measure_memory(engine or toy_engine(Path(folder)), log_folder() / "memory.log")
    title = f"Memory of an engine on {found.device}"
    publish(found, lambda: print_table(title, _COLUMNS, _rows(found)), as_json=as_json)
    keep_figures(record, {name or "memory": found}, "memory")
    if found.device == "cuda" and not found.within_aim:
        note("the prediction is off by more than 5%")
        return FAILED
    return 0


def _rows(found: MemoryFigures) -> list[tuple[str, str, str, str]]:
    rows = [
        (stage, part.predicted_mb, part.measured_mb, part.predicted_over_measured)
        for stage, part in found.parts.items()
    ]
    rows.append(("all", found.predicted_mb, found.measured_mb, found.predicted_over_measured))
    return [
        (stage, figure(predicted, ".1f"), figure(measured, ".1f"), figure(ratio, ".3f"))
        for stage, predicted, measured, ratio in rows
    ]
