"""Console output of commands: rich text, progress bars and tables; plain off a terminal."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unicodedata import category

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hearth.daemon.cli.errors import UNREAD

_TAB_COLUMNS = 8


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """End as SIGPIPE ends a program: rich's own exit code is that of a failure."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            sys.exit(UNREAD)


def out() -> Console:
    """Standard output; no colours when it is not a terminal or NO_COLOR is set."""
    return _Screen(highlight=False, soft_wrap=True)


def err() -> Console:
    """Standard error, likewise."""
    return _Screen(stderr=True, highlight=False, soft_wrap=True)


def show(renderable: RenderableType) -> None:
    """Print on standard output; off a terminal no line ends in blanks."""
    screen = out()
    if screen.is_terminal:
        screen.print(renderable)
        return
    with screen.capture() as captured:
        screen.print(renderable)
    screen.out("\n".join(line.rstrip() for line in captured.get().splitlines()))


class _Rows:
    """Names and values side by side; values fold on a terminal, and elsewhere are as they are."""

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        self._rows = [(name, printable(value)) for name, value in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max((len(name) for name, _ in self._rows), default=0)
        if not console.is_terminal:
            yield from (Text(f"{name:<{width}}  {value}".rstrip()) for name, value in self._rows)
            return
        grid = Table(box=None, show_header=False, pad_edge=False)
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in self._rows:
            grid.add_row(Text(name), Text(value))
        yield grid


def table(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """A two-column table of names and values without borders."""
    return _Rows(rows)


def printable(text: str) -> str:
    """`text` without control characters, which could steer the terminal; line ends stay."""
    return "".join(c if c in "\n\t" or category(c) != "Cc" else "\ufffd" for c in text)


def print_call(name: str, arguments: dict[str, Any]) -> None:
    """Print a call of a tool: its name, and its arguments as JSON."""
    text = printable(json.dumps(arguments, ensure_ascii=False))
    out().print(f"{printable_name(name)} {text}", markup=False)


def printable_name(text: str) -> str:
    """`text` on one line, without anything that has no shape of its own."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


class Lines:
    """Text that arrives in parts, as lines of at most `width` columns."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap = self._word = ""

    def feed(self, text: str) -> str:
        """Text that can be shown by now: an unfinished word is held, with the space before it."""
        return "".join(map(self._add, text))

    def rest(self) -> str:
        """Text that was held."""
        return self._end_word()

    def _add(self, char: str) -> str:
        if char == "\n":
            shown = self._end_word()
            self._column, self._gap = 0, ""
            return shown + char
        if char.isspace():
            shown = self._end_word()
            self._gap += " " * _TAB_COLUMNS if char == "\t" else char
            return shown
        self._word += char
        # Scripts without spaces have wide characters, and break behind each of them.
        whole = cell_len(char) > 1 or cell_len(self._word) >= self._width
        return self._end_word() if whole else ""

    def _end_word(self) -> str:
        if not self._word:
            return ""
        shown, size = self._gap + self._word, cell_len(self._word)
        if self._column and self._column + len(self._gap) + size > self._width:
            shown, self._column = "\n" + self._word, size
        else:
            self._column += len(self._gap) + size
        self._gap = self._word = ""
        return shown


def size(count: float) -> str:
    """Bytes in words: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:  # noqa: PLR2004 - bytes per KiB
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback (stage, done, total) with one bar per stage on standard error."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    progress = Progress(*columns, console=err())

    def advance(stage: str, done: int, total: int) -> None:
        # Not before there is work: without any, not even an empty line is to be printed.
        progress.start()
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            progress.stop()
