import sys
import time
from collections import deque
from collections.abc import Callable

import click
import msgspec
from rich.console import Console
from rich.live import Live

from daemon.cli.clients import daemon_address
from daemon.cli.console import out, show
from daemon.cli.options import json_option, socket_option
from daemon.control.client import ask
from daemon.control.messages import Cancelled, CancelRequest, Top, TopReport
from daemon.top.board import Board, pressed
from daemon.top.keys import key_presses
from daemon.top.view import Rates, rates, view
from runtime.errors import HearthError

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
