"""How the bench prints: tables for people, one JSON object on the last line for programs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from daemon.cli.console import out
from daemon.shipped import cache_folder

_PLAIN_WIDTH = 200
"""Columns of a table that nobody looks at through a terminal."""


def note(text: str) -> None:
    """Say on standard error what goes on."""
    click.echo(text, err=True)


def log_folder() -> Path:
    """Where the processes of a bench write what they have to say, made if need be."""
    folder = cache_folder() / "bench" / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(value: Any, show: Callable[[], None], *, as_json: bool) -> None:
    """Print `value` for programs, or call `show`, which prints it for people."""
    if as_json:
        print_json(value)
    else:
        show()


def print_json(value: Any) -> None:
    """Print one object on one line, floats with six significant digits."""
    click.echo(msgspec.json.encode(rounded(msgspec.to_builtins(value))).decode())


def rounded(value: Any) -> Any:
    """The same value with all floats at six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is a name, the others are figures."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        grid.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    console = out()
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    console.print(grid)


def print_fields(title: str, value: msgspec.Struct, form: str) -> None:
    """Print a table with a row for each field; `form` is that of a fraction."""
    rows = [
        (name, figure(field, form) if isinstance(field, float) else str(field))
        for name, field in msgspec.structs.asdict(value).items()
    ]
    print_table(title, ("", ""), rows)


def figure(value: float | None, form: str = ".2f") -> str:
    """A figure as text; a dash where there is none."""
    return "-" if value is None else format(value, form)
