"""The screen as text, at the widths that terminals have."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hearth.daemon.cli.top.board import Board
from hearth.daemon.cli.top.view import KEYS, Rates, rates, view
from hearth.daemon.control.messages import TopReport
from hearth.daemon.door.overview import OpenClient
from tests.daemon.cli.top.reports import report, running


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
