"""Reports of benches: tables for people, one JSON object for programs, a machine's record."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from hearth.daemon.cli.console import out
from hearth.daemon.cli.errors import FAILED
from hearth.runtime.errors import HearthError
from hearth.runtime.files import cache_folder

COMMIT_VARIABLE = "BENCH_COMMIT"
_GIT = ("git", "rev-parse", "--short=12", "HEAD")
_WHOLE = 1000
_PLAIN_WIDTH = 200
"""Columns of a table that is not printed to a terminal."""


def note(text: str) -> None:
    """Say on standard error what goes on."""
    click.echo(text, err=True)


def log_folder(cache: Path | None = None) -> Path:
    """Folder of the logs of a bench's processes, made if need be."""
    folder = (cache or cache_folder() / "bench") / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def judged(faults: Iterable[str]) -> int:
    """Say on standard error what is wrong with a bench's figures; its exit code."""
    code = 0
    for fault in faults:
        note(fault)
        code = FAILED
    return code


def publish(figures: Any, show: Callable[[], None], *, as_json: bool) -> None:
    """Print figures as one line of JSON for programs, or call `show`, which prints for people."""
    if as_json:
        click.echo(msgspec.json.encode(rounded(figures)).decode())
    else:
        show()


def rounded(value: Any) -> Any:
    """A value as JSON has it, all floats at six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return rounded(msgspec.to_builtins(value)) if isinstance(value, msgspec.Struct) else value


def print_cases(title: str, fields: str, cases: Mapping[str, Any]) -> None:
    """Print a table with a row for each case: its name, then the named fields of its figures."""
    names = fields.split()
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    grid.add_column("case", no_wrap=True)
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for case, figures in cases.items():
        grid.add_row(case, *(figure(getattr(figures, name)) for name in names))
    _print(grid)


def print_fields(title: str, figures: msgspec.Struct) -> None:
    """Print a table with a row for each field."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    for name, value in msgspec.structs.asdict(figures).items():
        grid.add_row(name, str(value) if isinstance(value, list) else figure(value))
    _print(grid)


def _print(grid: Table) -> None:
    console = out()
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    console.print(grid)


def figure(value: Any) -> str:
    """A figure as text: four digits of a fraction, how many are in a list, a dash for none."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < _WHOLE else f"{value:.0f}"
    if isinstance(value, list):
        return str(len(value))
    return "-" if value is None or value == "" else str(value)


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """A day's run at one commit; `command` holds every command that gave some of its figures."""

    date: str
    commit: str
    command: str


class EarlierRun(Run):
    """A run of another day or commit, with the keys of the figures that are still its own."""

    keys: list[str]


class Recorded(Run, omit_defaults=True):
    """The figures of a machine: those of the last run, and of earlier runs what it did not give."""

    figures: dict[str, Any]
    earlier: list[EarlierRun] = []

    def run_of(self, key: str) -> Run:
        """The run that gave the figures of a key."""
        return next((run for run in self.earlier if key in run.keys), self)


class Record:
    """The file that keeps a machine's figures; where none is given nothing is kept.

    `command` is the command line that gives them. Made before anything is measured: raises
    `invalid_value` when the file holds something else, or no commit is known.
    """

    def __init__(self, file: Path | None, command: Sequence[str]) -> None:
        self.file = file
        self._line = shlex.join(command)
        if file is not None:
            self._commit = current_commit()
            read_record(file)

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Merge `figures` into the file by key; others keep the day and commit of their run."""
        if self.file is None:
            return
        today = datetime.now(timezone.utc).date().isoformat()
        older = read_record(self.file) or Recorded(today, self._commit, "", {})
        earlier = list(older.earlier)
        command = older.command
        if (older.date, older.commit) != (today, self._commit):
            since = {key for run in earlier for key in run.keys}
            own = [key for key in older.figures if key not in since]
            earlier.insert(0, EarlierRun(older.date, older.commit, older.command, own))
            command = ""
        commands = [one for one in command.split(" && ") if one]
        kept = Recorded(
            date=today,
            commit=self._commit,
            command=" && ".join(dict.fromkeys([*commands, self._line])),
            figures={**older.figures, **rounded(figures)},
            earlier=_without(earlier, figures),
        )
        write_record(self.file, kept)


def _without(earlier: Iterable[EarlierRun], measured: Container[str]) -> list[EarlierRun]:
    """Runs without the keys that were measured anew, and without those that have none left."""
    left = [
        msgspec.structs.replace(run, keys=[key for key in run.keys if key not in measured])
        for run in earlier
    ]
    return [run for run in left if run.keys]


def record_option(command: Any) -> Any:
    """The option `--record FILE` of a bench, which gets a `Record`."""
    return click.option(
        "--record",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        callback=lambda context, _, file: Record(file, command_line(context.command_path)),
        help="Also merge the figures into FILE, which names the commit: that of the repository, "
        f"or ${COMMIT_VARIABLE}.",
    )(command)


def command_line(program: str) -> list[str]:
    """The words of a click command's path, and the arguments that this process was given for it.

    Without the place of the record, which says nothing of the figures.
    """
    words = program.split()
    given = sys.argv[sys.argv.index(words[-1]) + 1 :] if words[-1] in sys.argv else sys.argv[1:]
    while "--record" in given:
        at = given.index("--record")
        given = given[:at] + given[at + 2 :]
    return [*words, *(word for word in given if not word.startswith("--record="))]


def current_commit() -> str:
    """The commit that is measured; raises `invalid_value` where none is known."""
    given = os.environ.get(COMMIT_VARIABLE, "")
    if given:
        return given
    try:
        done = subprocess.run(_GIT, capture_output=True, check=True, text=True)  # noqa: S603 - fixed
    except (OSError, subprocess.CalledProcessError) as error:
        raise HearthError(
            "invalid_value", f"no commit is known: set ${COMMIT_VARIABLE}", "record"
        ) from error
    return done.stdout.strip()


def read_record(file: Path) -> Recorded | None:
    """Read a file of figures, if it is there; raises `invalid_value` for another file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Recorded)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise HearthError(
            "invalid_value", f"{file} holds no figures of a bench: {error}", "record"
        ) from error


def write_record(file: Path, recorded: Recorded) -> None:
    """Write a file of figures whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1) + b"\n")
    partial.replace(file)
