"""The screen of `hearth top`, its state, and the action of each key; pure."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hearth.daemon.cli.console import printable_name, size
from hearth.daemon.control.messages import CancelRequest, TopReport
from hearth.daemon.door.overview import OpenClient, RunningRequest
from hearth.daemon.service_state import words

Sort = Literal["age", "tokens", "client", "state"]
SORTS: tuple[Sort, ...] = get_args(Sort)
Action = Literal["quit"] | CancelRequest | None

_ORDER: dict[Sort, Callable[[RunningRequest], Any]] = {
    "age": lambda one: -one.age_s,
    "tokens": lambda one: -one.tokens,
    "client": lambda one: one.client,
    "state": lambda one: one.state,
}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}


class Board(NamedTuple):
    """The order of requests, the chosen one, if any, and the text of the last line.

    While `asking` is set the next key answers whether the chosen request is to be ended.
    """

    sort: Sort = "age"
    chosen: str = ""
    asking: bool = False
    said: str = ""


def ordered(report: TopReport, sort: Sort) -> list[RunningRequest]:
    """The open requests in their order on the screen; the older ones first among equals."""
    return sorted(report.requests, key=_ORDER[sort])


def pressed(board: Board, key: str, report: TopReport) -> tuple[Board, Action]:
    """The board behind a key, and what is to be done."""
    if board.asking:
        # The request of the question, whichever is in its row by now.
        action = CancelRequest(board.chosen) if key == "y" else None
        return board._replace(asking=False, said=""), action
    if key == "q":
        return board, "quit"
    board = board._replace(said="")
    names = [one.request for one in ordered(report, board.sort)]
    if key == "s":
        return board._replace(sort=SORTS[(SORTS.index(board.sort) + 1) % len(SORTS)]), None
    if key in _STEPS and names:
        return board._replace(chosen=_moved(names, board.chosen, _STEPS[key])), None
    if key == "c":
        asking = board.chosen in names
        return board._replace(asking=asking, said="" if asking else "choose a request first"), None
    return board, None


def _moved(names: list[str], chosen: str, step: int) -> str:
    if chosen not in names:
        return names[0]
    return names[min(max(names.index(chosen) + step, 0), len(names) - 1)]


KEYS = "up/down choose   c cancel it   s sort   q quit"
_COLOURS = {"ready": "green", "failed": "red"}
_BAR = 10
_HEAD = 7
"""Lines that are always there: five of figures, the heading of the requests, the last one."""
_SECTION = 2
"""Lines of another section beside its rows: an empty one and its heading."""
_CLIENTS = 5
_ERRORS = 3
_FEWEST = 4
"""Rows of requests that other sections leave, if there are so many."""


class Rates(NamedTuple):
    """Rates between two reports, by second."""

    tokens: float
    requests: float


def rates(before: TopReport, after: TopReport) -> Rates | None:
    """None for reports of the same moment, or of two runs of the daemon."""
    seconds = after.now - before.now
    if seconds <= 0 or after.uptime_s < before.uptime_s:
        return None
    ended = _ended(after) - _ended(before)
    return Rates((after.tokens - before.tokens) / seconds, ended / seconds)


def view(
    report: TopReport, board: Board, speed: Rates | None = None, height: int | None = None
) -> RenderableType:
    """All of a report, or as much as `height` lines hold, whatever their width."""
    rows = ordered(report, board.sort)
    clients = sorted(report.clients, key=lambda one: (-one.open, -one.tokens))
    room = 1_000_000 if height is None else height - _HEAD
    errors = _share(len(report.errors), room, len(rows), _ERRORS if height else 8)
    room -= errors + _SECTION * bool(errors)
    some = _share(len(clients), room, len(rows), _CLIENTS if height else len(clients))
    room -= some + _SECTION * bool(some)
    parts: list[RenderableType] = [
        *_head(report, speed),
        _requests(rows, report.open, board, max(room, 0)),
    ]
    if some:
        parts += ["", _clients(clients[:some], len(clients))]
    if errors:
        parts += ["", _errors(report, errors)]
    return Group(*parts, _last_line(report, board)) if height else Group(*parts)


def _share(count: int, room: int, requests: int, most: int) -> int:
    """Number of rows of a section, behind as many requests as are to be shown first."""
    return max(0, min(count, most, room - _SECTION - min(requests, _FEWEST)))


def _head(report: TopReport, speed: Rates | None) -> list[Text]:
    state = words(report.state, report.stage, report.share, report.reason)
    full = round(_BAR * min(1.0, report.running / report.places)) if report.places else 0
    totals = report.totals
    memory = "   ".join(f"{name} {size(count)}" for name, count in sorted(report.memory.items()))
    refused = ", ".join(f"{code} {count}" for code, count in sorted(report.refusals.items()))
    told = f"{speed.tokens:.0f} tokens/s   {speed.requests:.1f} requests/s" if speed else "-"
    if report.prefix_queried:
        told += f"   {report.prefix_reused / report.prefix_queried:.0%} of prompts reused"
    lines = [
        Text.assemble(
            (f"{report.server}  {report.model}  ", "bold"),
            (printable_name(state), _COLOURS.get(report.state, "yellow")),
            f"  up {_duration(report.uptime_s)}   restarts {report.restarts}",
        ),
        Text.assemble(
            ("places ", "cyan"),
            ("█" * full, "green"),
            ("░" * (_BAR - full), "bright_black"),
            f" {report.running} of {report.places}   ",
            ("queue ", "cyan"),
            f"{report.queued} requests, {report.queued_tokens} tokens",
        ),
        Text.assemble(("speed ", "cyan"), told),
        Text.assemble(("memory ", "cyan"), memory),
        Text.assemble(
            ("requests ", "cyan"),
            f"{report.open} open   {totals.get('completed', 0)} completed   "
            f"{totals.get('cancelled', 0)} cancelled   {totals.get('failed', 0)} failed   ",
            f"refused {refused}" if refused else "none refused",
        ),
    ]
    return [_one_line(line) for line in lines]


def _requests(
    rows: Sequence[RunningRequest], count: int, board: Board, room: int
) -> RenderableType:
    grid = _table("request", "state", client="client", right=("prompt", "tokens", "age"))
    grid.columns[0].header = f"request ({count} by {board.sort})"
    for one in _around(rows, board.chosen, room):
        grid.add_row(
            one.request,
            one.state,
            Text(printable_name(one.client)),
            str(one.prompt_tokens),
            str(one.tokens),
            f"{one.age_s:.1f} s",
            style="reverse" if one.request == board.chosen else "",
        )
    return grid


def _around(rows: Sequence[RunningRequest], chosen: str, room: int) -> Sequence[RunningRequest]:
    """Rows that fit on the screen, the chosen one among them."""
    place = next((place for place, one in enumerate(rows) if one.request == chosen), 0)
    first = min(max(0, place - room + 1), max(0, len(rows) - room))
    return rows[first : first + room]


def _clients(clients: Sequence[OpenClient], count: int) -> RenderableType:
    grid = _table(client=f"client ({count})", right=("open", "tokens"))
    for one in clients:
        grid.add_row(Text(printable_name(one.name) or "-"), str(one.open), str(one.tokens))
    return grid


def _errors(report: TopReport, count: int) -> RenderableType:
    grid = _table("last errors", "request", client="client", right=("ago",))
    for one in report.errors[: -count - 1 : -1]:
        ago = report.now - one.opened - one.total_s
        grid.add_row(
            Text(one.reason, style="red"),
            one.request,
            Text(printable_name(one.client)),
            _duration(ago),
        )
    return grid


def _table(*names: str, client: str, right: Sequence[str]) -> Table:
    """Columns of their own width; the client's name gets what is left, and is cut."""
    grid = Table(box=None, pad_edge=False, header_style="bold cyan", expand=True)
    for name in names:
        grid.add_column(name, no_wrap=True)
    grid.add_column(client, no_wrap=True, overflow="ellipsis", ratio=1)
    for name in right:
        grid.add_column(name, no_wrap=True, justify="right")
    return grid


def _last_line(report: TopReport, board: Board) -> Text:
    if not board.asking:
        return _one_line(Text(printable_name(board.said) or KEYS, style="dim"))
    open_ = {one.request: one.client for one in report.requests}
    asked = f"{board.chosen} has ended meanwhile: n goes on"
    if board.chosen in open_:
        client = printable_name(open_[board.chosen])
        asked = f"end {board.chosen} of {client}? its client gets an error: y/n"
    return _one_line(Text(asked, style="bold yellow"))


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _ended(report: TopReport) -> int:
    return sum(report.totals.get(name, 0) for name in ("completed", "cancelled", "failed"))


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole:02d} s" if minutes else f"{whole} s"
