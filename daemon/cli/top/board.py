"""State of the screen of `hearth top`, and the action of each key; pure."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from hearth.daemon.control.messages import CancelRequest, TopReport
from hearth.daemon.door.overview import RunningRequest

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
