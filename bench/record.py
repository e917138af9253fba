"""The file that keeps the figures of a machine: `--record FILE`."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import msgspec

from bench.report import rounded
from runtime.errors import HearthError

COMMIT_VARIABLE = "BENCH_COMMIT"
_GIT = ("git", "rev-parse", "--short=12", "HEAD")


class Recorded(msgspec.Struct, forbid_unknown_fields=True):
    """A day's figures at one commit; `command` holds every command that gave some of them."""

    date: str
    commit: str
    command: str
    figures: dict[str, Any]


def record_option(command: Any) -> Any:
    """The option `--record FILE` of a bench."""
    return click.option(
        "--record",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Also merge the figures into FILE, which names the commit: that of the repository, "
        f"or ${COMMIT_VARIABLE}.",
    )(command)


def keep_figures(file: Path | None, figures: Mapping[str, Any], name: str) -> None:
    """Write the figures of bench command `name` to `file` if one was given; see `write_record`."""
    if file is not None:
        write_record(file, figures, command_line(name))


def write_record(file: Path, figures: Mapping[str, Any], command: Sequence[str]) -> None:
    """Merge `figures` into `file` by key; figures of another commit make room.

    `command` is the command line behind the program's name. Raises `invalid_value` when the
    file holds something else, or no commit is known.
    """
    commit = current_commit()
    line = shlex.join(["hearth", *command])
    older = _read(file)
    if older is None or older.commit != commit:
        older = Recorded("", commit, "", {})
    commands = [one for one in older.command.split(" && ") if one]
    kept = Recorded(
        date=datetime.now(timezone.utc).date().isoformat(),
        commit=commit,
        command=" && ".join(dict.fromkeys([*commands, line])),
        figures={**older.figures, **rounded(msgspec.to_builtins(dict(figures)))},
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    partial.replace(file)


def command_line(name: str) -> list[str]:
    """The arguments that this program was started with, from bench command `name` on.

    Without the place of the record, which says nothing of the figures.
    """
    given = sys.argv[sys.argv.index(name) + 1 :] if name in sys.argv else []
    while "--record" in given:
        at = given.index("--record")
        given = given[:at] + given[at + 2 :]
    return ["bench", name, *(word for word in given if not word.startswith("--record="))]


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


def _read(file: Path) -> Recorded | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Recorded)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise HearthError(
            "invalid_value", f"{file} holds no figures of a bench: {error}", "record"
        ) from error
