"""The command `faults`: what is done to a daemon, and what it makes of it."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from hearth.bench.arrivals.ideal import MAX_RANK
from hearth.bench.report import Record, figure, note, publish, record_option
from hearth.bench.toy_daemon import engine_option, given_or_toy
from hearth.daemon.cli.console import out
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import json_option
from hearth.runtime.vision_config import VISION_FOLDER
from tests.system.faults.rows import NOT_RUN, ROWS, Row
from tests.system.faults.trial import Fixture, NotRunError, Trial, seconds_since

_VERDICT_FIELDS = ("survived", "limit", "broken")


class FaultFigures(msgspec.Struct, kw_only=True):
    """Counts of rows survived; `lost` are requests without exactly one terminal answer."""

    survived: int
    of: int
    lost: int
    requests: int
    seconds: float
    rows: dict[str, dict[str, Any]]
    not_run: dict[str, str]


@click.command()
@click.argument("only", nargs=-1, metavar="[ROW]...")
@engine_option("the simulated engine")
@click.option(
    "--seeing",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="An engine folder of a model that sees, for the rows about pictures.  [that of --engine, "
    "or the shipped model's vision variant]",
)
@record_option
@json_option
def faults(
    only: tuple[str, ...],
    engine: Path | None,
    seeing: Path | None,
    record: Record,
    *,
    as_json: bool,
) -> int:
    """Kill, stop and mislead a daemon, and measure what becomes of its requests.

    ROW is a part of a row's name; without any all are tried. Every row works with real processes,
    signals and sockets, and has a limit that it keeps or not. The exit code is 1 when one did not,
    or a request was lost.
    """
    rows = chosen(only)
    figures = try_rows(rows, engine, seeing)
    publish(figures, lambda: show(figures), as_json=as_json)
    record.keep(recorded(figures))
    return 0 if figures.survived == figures.of and not figures.lost else FAILED


def chosen(only: Sequence[str]) -> list[Row]:
    """The rows whose names hold one of the texts, all where there is none.

    Raises click.UsageError for a text that no name holds.
    """
    for text in only:
        if not any(text.lower() in row.name.lower() for row in ROWS):
            names = ", ".join(row.name for row in ROWS)
            raise click.UsageError(f"{text!r} is no part of a row's name: {names}")
    return [
        row for row in ROWS if not only or any(text.lower() in row.name.lower() for text in only)
    ]


def try_rows(rows: Sequence[Row], engine: Path | None, seeing: Path | None = None) -> FaultFigures:
    """Try one row after the other; a daemon that one has ended is started anew for the next."""
    started = time.monotonic()
    trials = {}
    not_run = dict(NOT_RUN)
    with ExitStack() as stack:
        folder = stack.enter_context(given_or_toy(engine, MAX_RANK))
        if seeing is None and (folder / VISION_FOLDER).is_dir():
            seeing = folder
        fixture = Fixture(folder, stack, simulated=engine is None, seeing=seeing)
        for row in rows:
            tried = _try(row, Trial(fixture))
            if isinstance(tried, str):
                not_run[row.name] = tried
            else:
                trials[row.name] = tried
    return FaultFigures(
        survived=sum(one["survived"] for one in trials.values()),
        of=len(trials),
        lost=sum(one["lost"] for one in trials.values()),
        requests=sum(one["requests"] for one in trials.values()),
        seconds=seconds_since(started),
        rows=trials,
        not_run=not_run,
    )


def _try(row: Row, trial: Trial) -> dict[str, Any] | str:
    """The figures of a row, or why it cannot be tried here."""
    started = time.monotonic()
    try:
        row.run(trial)
    except NotRunError as missing:
        return str(missing)
    except Exception as error:  # noqa: BLE001 - what one row meets must not hide the others
        trial.broken.append(f"{type(error).__name__}: {error}")
    survived = not (trial.broken or trial.lost)
    note(f"{row.name}: {verdict(survived)}")
    for reason in trial.broken:
        note(f"    {reason}")
    return {
        "survived": survived,
        "limit": row.limit,
        "requests": trial.requests,
        "lost": trial.lost,
        "seconds": seconds_since(started),
        **trial.measured,
        **({"broken": trial.broken} if trial.broken else {}),
    }


def recorded(figures: FaultFigures) -> dict[str, Any]:
    """Figures for a record: each row by a key of its own, the sums where every row was tried."""
    rows = {f"faults/{name}": row for name, row in figures.rows.items()}
    if len(figures.rows) + len(figures.not_run) < len(ROWS) + len(NOT_RUN):
        return rows
    sums = msgspec.structs.asdict(figures)
    del sums["rows"]
    return {"faults": sums, **rows}


def show(figures: FaultFigures) -> None:
    """Print the rows for people."""
    console = out()
    for name, row in figures.rows.items():
        measured = {key: value for key, value in row.items() if key not in _VERDICT_FIELDS}
        console.print(f"[bold]{name}[/]: {verdict(row['survived'])}", highlight=False)
        console.print(f"  {', '.join(f'{key} {figure(value)}' for key, value in measured.items())}")
    for name, reason in figures.not_run.items():
        console.print(f"[bold]{name}[/]: not run, {reason}", highlight=False)
    console.print(f"{figures.survived} of {figures.of} survived, {figures.lost} requests lost")


def verdict(survived: bool) -> str:  # noqa: FBT001 - the one thing that it is about
    """The word for a row that survived, or did not."""
    return "survived" if survived else "NOT SURVIVED"
