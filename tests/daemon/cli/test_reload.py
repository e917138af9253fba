import json

import pytest
from click.testing import CliRunner

from hearth.daemon.cli import reload as module
from hearth.daemon.control.messages import Reload, Reloaded
from hearth.runtime.errors import HearthError


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        (
            Reloaded([], []),
            ["nothing has changed: a reload reads the settings file, flags and variables stay"],
        ),
        (Reloaded(["hold_s", "log_level"], []), ["reloaded: hold_s, log_level"]),
        (
            Reloaded(["hold_s"], ["engine", "threads"]),
            ["reloaded: hold_s", "takes effect at a restart: engine, threads"],
        ),
    ],
)
def test_the_outcome_is_said(
    monkeypatch: pytest.MonkeyPatch, answer: Reloaded, lines: list[str]
) -> None:
    def ask(request: Reload, kind: type[Reloaded], socket: str) -> Reloaded:
        assert (request, kind, socket) == (Reload(), Reloaded, "/h.sock")
        return answer

    monkeypatch.setattr(module, "ask", ask)
    result = CliRunner().invoke(module.reload, ["--socket", "/h.sock"])
    assert (result.exit_code, result.output.splitlines()) == (0, lines)


def test_programs_get_it_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask", lambda *_: Reloaded(["hold_s"], ["threads"]))
    told = json.loads(CliRunner().invoke(module.reload, ["--json"]).output)
    assert (told["changed"], told["needs_restart"]) == (["hold_s"], ["threads"])


def test_what_is_refused_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> Reloaded:
        raise HearthError("invalid_value", "hearth.toml, clients: 0 is not allowed", "clients")

    monkeypatch.setattr(module, "ask", ask)
    result = CliRunner().invoke(module.reload, ["--socket", "/h.sock"])
    assert isinstance(result.exception, HearthError)
    assert result.exit_code == 1
