from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from hearth.daemon.cli.top import command as module
from hearth.daemon.control.messages import Cancelled, CancelRequest, Top
from hearth.runtime.errors import HearthError
from tests.daemon.cli.top.reports import report


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
