"""Keys as they are pressed, from a terminal that is put back as it was."""

import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console
from rich.live import Live

from hearth.daemon.cli.clients import daemon_address
from hearth.daemon.cli.console import out, show
from hearth.daemon.cli.options import json_option, socket_option
from hearth.daemon.cli.top.view import Board, Rates, pressed, rates, view
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Cancelled, CancelRequest, Top, TopReport
from hearth.runtime.errors import HearthError

_ARROWS = {b"A": "up", b"B": "down"}
_KEY = re.compile(rb"\x1b[\[O](?P<arrow>[A-Z])|\x1b|(?P<plain>.)", re.DOTALL)


@contextmanager
def key_presses(descriptor: int) -> Iterator[Callable[[float], list[str]]]:
    """A function that waits for keys, some seconds at most: letters, `up` and `down`.

    Where the terminal has gone they are `q`.
    """
    before = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> list[str]:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, seconds))
        return keys_of(os.read(descriptor, 256)) if ready else []

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        # What was typed and not read is no command for the shell.
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def keys_of(data: bytes) -> list[str]:
    """The names of the keys that gave these bytes; other keys than those named give none."""
    if not data:
        return ["q"]
    found = []
    for match in _KEY.finditer(data):
        arrow, plain = match["arrow"], match["plain"]
        name = _ARROWS.get(arrow, "") if arrow else (plain or b"").decode("ascii", "ignore")
        if name:
            found.append(name)
    return found


_REFRESH_S = 1.0
_ANSWER_S = 5.0
_SPAN = 6
"""Reports over which rates are taken."""


class Daemon:
    """The daemon at `socket`, with the reports that it gave last."""

    def __init__(self, socket: str | None) -> None:
        self._socket = socket
        self._reports: deque[TopReport] = deque(maxlen=_SPAN)

    def look(self) -> TopReport:
        """A new report."""
        report = ask(Top(), TopReport, self._socket, timeout_s=_ANSWER_S)
        self._reports.append(report)
        return report

    @property
    def speed(self) -> Rates | None:
        """The rates of the last seconds."""
        return rates(self._reports[0], self._reports[-1])

    def cancel(self, asked: CancelRequest) -> str:
        """End a request; what is to be said of it."""
        try:
            ask(asked, Cancelled, self._socket, timeout_s=_ANSWER_S)
        except HearthError as error:
            return error.message
        return f"{asked.request} was ended"


@click.command()
@socket_option
@json_option
def top(socket: str | None, *, as_json: bool) -> None:
    """Show live what the daemon does, and end requests.

    The arrows choose a request, c ends it (its client gets the error cancelled_by_operator), s
    sorts by age, tokens, client or state, q quits. Off a terminal it prints one report. To be run
    as the daemon's user or root.
    """
    daemon, screen = Daemon(daemon_address(socket)), out()
    report = daemon.look()
    if as_json:
        click.echo(msgspec.json.encode(report))
    elif screen.is_terminal and not screen.is_dumb_terminal and sys.stdin.isatty():
        with key_presses(sys.stdin.fileno()) as wait:
            watch(daemon, report, wait, screen)
    else:
        time.sleep(_REFRESH_S)
        show(view(daemon.look(), Board(), daemon.speed))


def watch(
    daemon: Daemon, report: TopReport, wait: Callable[[float], list[str]], screen: Console
) -> None:
    """Show a report a second on a screen of its own until `q`; `wait` gives the keys."""
    board = Board()
    due = time.monotonic() + _REFRESH_S
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(report, board, daemon.speed, screen.height), refresh=True)
            for key in wait(due - time.monotonic()):
                board, action = pressed(board, key, report)
                if action == "quit":
                    return
                if isinstance(action, CancelRequest):
                    board = board._replace(said=daemon.cancel(action))
            if time.monotonic() >= due:
                try:
                    report = daemon.look()
                except HearthError as error:
                    board = board._replace(said=error.message)
                due = time.monotonic() + _REFRESH_S
