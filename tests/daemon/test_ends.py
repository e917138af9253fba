"""How the daemon's process ends by what failed in it; test_end_to_end.py has how it stops."""

from pathlib import Path

import pytest
import structlog

from hearth.daemon import watchdog as notify_module
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.exit_codes import CONFIGURATION, EXECUTOR_FAILED, EXECUTOR_STUCK, FAILED
from hearth.daemon.service import serve
from hearth.daemon.supervision.restart_policy import stuck
from hearth.daemon.supervision.supervisor import Supervisor
from hearth.runtime.errors import HearthError

LOST = HearthError("executor_failed", "the executor was lost, 3 restarts did not help: it crashed")
WRONG = HearthError("wrong_answer", "the engine does not compute its model", "engine")


@pytest.mark.parametrize(
    "end",
    [
        (LOST, EXECUTOR_FAILED, LOST.message),
        (stuck("executor", "it crashed"), EXECUTOR_STUCK, "restart the machine"),
        (WRONG, CONFIGURATION, WRONG.message),
        (HearthError("queue_full", "the mailbox is full"), FAILED, "the mailbox is full"),
        (ValueError("a fault"), FAILED, "its log tells why"),
    ],
    ids=lambda end: end[1],
)
def test_each_failure_has_its_code_and_its_last_words(
    tiny_engine: Path,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: tuple[Exception, int, str],
) -> None:
    error, code, words = end

    async def run(_supervisor: Supervisor) -> None:
        raise error

    told: list[str] = []
    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(notify_module, "notify", told.append)
    settings = settings_of(socket=str(short_folder / "s"), log_format="json")
    assert serve(settings, tiny_engine) == code
    structlog.reset_defaults()
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert told[-1].startswith("STATUS=failed (")
    assert words in told[-1]
    assert [path.name for path in short_folder.iterdir()] == ["s.lock"]
