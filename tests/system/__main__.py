"""Runs that judge a whole daemon by real processes: `make system ROW="GPU actor killed"`.

`python -m tests.system [ROW]...`: `faults`, `overload` and `soak` are whole runs, with options of
their own; any other ROW is one of overload or a part of the name of a fault. Without any all runs
follow one another.
"""

import sys
from collections.abc import Sequence

import click

from hearth.daemon.cli.errors import run_and_exit
from tests.system.faults.command import faults
from tests.system.overload import ROWS, overload
from tests.system.soak import soak

RUNS: dict[str, click.Command] = {"faults": faults, "overload": overload, "soak": soak}
_PROGRAM = "python -m tests.system"


def chosen(arguments: Sequence[str]) -> list[list[str]]:
    """The command lines of the runs that arguments ask for."""
    first = arguments[0] if arguments else ""
    if first in {*RUNS, "--help"}:
        return [list(arguments)]
    if not first or first.startswith("-"):
        return [[name, *arguments] for name in RUNS]
    return [["overload" if first in ROWS else "faults", *arguments]]


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for, one after the other; the first exit code other than 0."""
    system = click.Group("system", RUNS, help=__doc__)
    lines = chosen(arguments)
    codes = [system.main(line, _PROGRAM, standalone_mode=False) for line in lines]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
