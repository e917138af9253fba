"""The board and the screen of `hearth top` as text, its keys, and the command."""

from __future__ import annotations

import io
import json
import os
import pty
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from hearth.daemon.cli.top import command as module
from hearth.daemon.cli.top.command import key_presses, keys_of
from hearth.daemon.cli.top.view import (
    KEYS,
    SORTS,
    Board,
    Rates,
    Sort,
    ordered,
    pressed,
    rates,
    view,
)
from hearth.daemon.control.messages import Cancelled, CancelRequest, Top, TopReport
from hearth.daemon.door.overview import OpenClient
from hearth.runtime.errors import HearthError
from tests.daemon.cli.top.reports import report, running


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


def lines(
    found: TopReport, board: Board | None = None, width: int = 80, height: int | None = 24
) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, legacy_windows=False)
    console.print(view(found, board or Board(), Rates(412.4, 3.25), height))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen(width: int) -> None:
    expected = Path(__file__).with_name(f"screen_{width}.txt").read_text(encoding="utf-8")
    assert lines(report(), width=width) == expected.splitlines()


def test_how_much_of_all_prompts_was_known_is_told_where_there_was_one() -> None:
    found = report(prefix_queried=400, prefix_reused=300)
    assert lines(found)[2] == "speed 412 tokens/s   3.2 requests/s   75% of prompts reused"


@pytest.mark.parametrize("width", [1, 30, 80, 200])
@pytest.mark.parametrize("height", [1, 12, 60])
def test_nothing_is_wider_or_higher_than_the_terminal(width: int, height: int) -> None:
    many = report(
        requests=[running(number) for number in range(100)],
        clients=report().clients * 20,
        errors=report().errors * 8,
        reason="the executor was lost",
        refusals={"queue_full": 10**6, "too_many_requests": 10**6},
    )
    for board in (Board(), Board(chosen="b09922ff-50", asking=True)):
        found = lines(many, board, width, height)
        assert all(len(line) <= width for line in found)
        assert len(found) <= max(height, 8)


@pytest.mark.parametrize("chosen", [0, 1, 50, 98, 99])
def test_the_chosen_request_is_in_sight(chosen: int) -> None:
    many = report(requests=[running(number, age_s=100.0 - number) for number in range(100)])
    found = lines(many, Board(chosen=f"b09922ff-{chosen}"))
    assert any(line.startswith(f"b09922ff-{chosen} ") for line in found)


def test_off_a_terminal_all_is_told_and_no_keys() -> None:
    many = report(requests=[running(number) for number in range(100)])
    found = lines(many, height=None)
    assert sum("replying" in line for line in found) == 100
    assert KEYS not in found


def test_the_last_line_asks_and_tells() -> None:
    assert lines(report())[-1] == KEYS
    assert lines(report(), Board(said="b09922ff-1 was ended"))[-1] == "b09922ff-1 was ended"
    asked = lines(report(), Board(chosen="b09922ff-2", asking=True))[-1]
    assert asked == "end b09922ff-2 of robot in the kitchen? its client gets an error: y/n"


def test_an_idle_daemon_that_loads() -> None:
    found = lines(
        report(
            state="loading",
            stage="verifying",
            share=0.43,
            places=0,
            running=0,
            requests=[],
            clients=[],
            errors=[],
            refusals={},
            open=0,
        )
    )
    assert "loading: verifying, 43%" in found[0]
    assert found[1].startswith("places ░░░░░░░░░░ 0 of 0")
    assert found[4].endswith("none refused")


def test_names_of_clients_steer_no_terminal() -> None:
    wicked = "a\x1b[2J[red]"
    found = lines(report(requests=[running(1, client=wicked)]), Board("age", "b09922ff-1", True))
    assert sum("a\ufffd[2J[red]" in line for line in found) == 2
    assert not any("\x1b" in line for line in found)


def test_a_name_of_many_lines_takes_one() -> None:
    wicked = "\n".join("abcdefgh") + "\u2028\u202eevil"
    several = report(requests=[running(1, client=wicked)], clients=[OpenClient(wicked, 1, 9)])
    board = Board(chosen="b09922ff-1", asking=True)
    told = lines(several, board)
    assert len(told) == len(lines(report(requests=[running(1)], clients=[OpenClient("a", 1, 9)])))
    assert sum("a\ufffdb\ufffdc" in line for line in told) == 3
    assert not any("\u202e" in line for line in told)


def test_rates_are_those_between_two_reports() -> None:
    totals = {"completed": 68, "cancelled": 2, "failed": 1}
    later = report(now=152.5, uptime_s=3727.5, tokens=5500, totals=totals)
    assert rates(report(), later) == Rates(200.0, 4.0)
    assert rates(report(), report()) is None
    assert rates(later, report(now=200.0, uptime_s=1.0, tokens=0)) is None


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: what a person types into, and what a program reads."""
    person, program = pty.openpty()
    yield person, program
    os.close(person)
    os.close(program)


def mode(descriptor: int) -> int:
    return int(termios.tcgetattr(descriptor)[3]) & (termios.ICANON | termios.ECHO)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[Bs", ["up", "down", "s"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b[C\x1b\xc3\xa4", []),
        (b"", ["q"]),
    ],
)
def test_keys_have_names(data: bytes, keys: list[str]) -> None:
    assert keys_of(data) == keys


def test_a_key_needs_no_return_and_is_not_shown(terminal: tuple[int, int]) -> None:
    person, program = terminal
    with key_presses(program) as wait:
        assert mode(program) == 0
        assert wait(0) == []
        os.write(person, b"s")
        assert wait(10) == ["s"]
        assert wait(-1) == []


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, ValueError])
def test_the_terminal_is_put_back(
    terminal: tuple[int, int], end: type[BaseException] | None
) -> None:
    before = mode(terminal[1])
    assert before
    try:
        with key_presses(terminal[1]):
            if end is not None:
                raise end
    except (KeyboardInterrupt, ValueError):
        pass
    assert mode(terminal[1]) == before


class FakeDaemon:
    """Answers reports, each a second later than the one before, until it is gone."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.gone = False

    def ask(self, request: object, _kind: object, _socket: object, **_options: Any) -> object:
        if self.gone:
            raise HearthError("socket_unusable", "no daemon can be asked", "socket")
        self.asked.append(request)
        if isinstance(request, CancelRequest):
            return Cancelled(request.request)
        later = self.asked.count(Top())
        return report(now=150.0 + later, uptime_s=3725.0 + later, tokens=5000 + 100 * later)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    fake = FakeDaemon()
    monkeypatch.setattr(module, "ask", fake.ask)
    monkeypatch.setattr(module, "_REFRESH_S", 0.0)
    return fake


@pytest.mark.usefixtures("daemon")
def test_off_a_terminal_one_report_is_printed() -> None:
    result = CliRunner().invoke(module.top)
    assert result.exit_code == 0
    assert "100 tokens/s" in result.output
    assert "b09922ff-3" in result.output
    assert "\x1b" not in result.output


def test_programs_get_one_report(daemon: FakeDaemon) -> None:
    told = json.loads(CliRunner().invoke(module.top, ["--json"]).output)
    assert (told["places"], told["requests"][0]["request"]) == (8, "b09922ff-1")
    assert daemon.asked == [Top()]


def watched(daemon: FakeDaemon, keys: Iterator[list[str]]) -> str:
    file = io.StringIO()
    screen = Console(file=file, width=90, height=24, force_terminal=True, color_system=None)
    watching = module.Daemon(None)

    def wait(_seconds: float) -> list[str]:
        found = next(keys)
        daemon.gone = daemon.gone or found == ["gone"]
        return found

    module.watch(watching, watching.look(), wait, screen)
    return file.getvalue()


def test_the_screen_is_taken_and_given_back(daemon: FakeDaemon) -> None:
    text = watched(daemon, iter([[], [], ["q"]]))
    assert text.index("\x1b[?1049h") < text.index("tokens/s") < text.index("\x1b[?1049l")
    assert daemon.asked == [Top()] * 3


def test_a_request_is_ended(daemon: FakeDaemon) -> None:
    text = watched(daemon, iter([["down", "c"], ["y"], ["q"]]))
    assert CancelRequest("b09922ff-1") in daemon.asked
    assert "b09922ff-1 was ended" in text


def test_a_daemon_that_goes_is_named_and_the_screen_stays(daemon: FakeDaemon) -> None:
    assert "no daemon can be asked" in watched(daemon, iter([["gone"], [], ["q"]]))
