from __future__ import annotations

import pytest

from hearth.daemon.cli.top.board import SORTS, Board, Sort, ordered, pressed
from hearth.daemon.control.messages import CancelRequest
from tests.daemon.cli.top.reports import report


def after(keys: str, board: Board | None = None) -> Board:
    board = board or Board()
    for key in keys.split():
        board, action = pressed(board, key, report())
        assert action is None
    return board


@pytest.mark.parametrize(
    ("sort", "numbers"),
    [("age", "123"), ("tokens", "213"), ("client", "132"), ("state", "123")],
)
def test_requests_are_sorted(sort: Sort, numbers: str) -> None:
    assert "".join(one.request[-1] for one in ordered(report(), sort)) == numbers


def test_s_goes_round_the_orders() -> None:
    board = Board()
    seen = []
    for _ in SORTS:
        board = after("s", board)
        seen.append(board.sort)
    assert seen == ["tokens", "client", "state", "age"]


@pytest.mark.parametrize(
    ("keys", "number"),
    [("down", 1), ("up", 1), ("down down", 2), ("j j k", 1), ("down down down down", 3)],
)
def test_arrows_choose_a_request(keys: str, number: int) -> None:
    assert after(keys).chosen == f"b09922ff-{number}"


def test_the_choice_stays_when_the_order_changes() -> None:
    assert after("down s").chosen == "b09922ff-1"
    assert after("down s down").chosen == "b09922ff-3"


def test_without_requests_there_is_nothing_to_choose() -> None:
    board, action = pressed(Board(), "down", report(requests=[]))
    assert (board, action) == (Board(), None)


def test_a_request_is_ended_by_c_and_y() -> None:
    board = after("down down c")
    assert board.asking
    board, action = pressed(board, "y", report())
    assert action == CancelRequest("b09922ff-2")
    assert not board.asking


@pytest.mark.parametrize("key", ["n", "q", "c", "down"])
def test_any_other_answer_ends_nothing(key: str) -> None:
    board = after("down c")
    assert pressed(board, key, report()) == (board._replace(asking=False), None)


def test_who_is_asked_about_is_ended_although_another_stands_there_now() -> None:
    board = after("down c")
    left = report(requests=report().requests[1:])
    assert pressed(board, "y", left)[1] == CancelRequest("b09922ff-1")


def test_c_without_a_choice_says_what_to_do() -> None:
    board = after("c")
    assert (board.asking, board.said) == (False, "choose a request first")
    assert after("x", board).said == ""


def test_q_quits() -> None:
    assert pressed(Board(), "q", report())[1] == "quit"
