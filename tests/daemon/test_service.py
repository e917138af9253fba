import signal
import socket
import sys
from pathlib import Path

import pytest
import structlog

from daemon.configuration.settings import Settings
from daemon.service import _reason, _stop_signals, serve
from runtime.errors import HearthError

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


def test_a_missing_engine_is_logged_in_one_line_and_an_error_of_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(Settings(log_format="json"), tmp_path / "none") == 78
    structlog.reset_defaults()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "engine_missing" in lines[0]


def test_an_unusable_socket_ends_before_anything_is_loaded(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(socket=str(tmp_path / "file" / "s"), log_format="json")
    assert serve(settings, tiny_engine) == 78
    structlog.reset_defaults()
    text = capsys.readouterr().err
    assert "socket_unusable" in text
    assert "actor" not in text


def test_a_port_for_metrics_that_is_taken_ends_before_anything_is_loaded(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(
            socket=str(short_folder / "s"),
            metrics_port=other.getsockname()[1],
            log_format="json",
        )
        assert serve(settings, tiny_engine) == 78
    structlog.reset_defaults()
    text = capsys.readouterr().err
    assert '"field":"metrics_port"' in text
    assert "actor" not in text
    assert not (short_folder / "s").exists()


def test_a_terminal_that_closes_asks_for_a_stop_unless_it_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_DFL)
    assert signal.SIGHUP in _stop_signals()
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_IGN)
    assert _stop_signals() == [signal.SIGTERM, signal.SIGINT]


def test_the_error_of_a_part_is_found_wherever_it_was_raised() -> None:
    cause = HearthError("queue_full", "behind")
    group = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [cause])])
    assert _reason(group) is cause


def test_an_unforeseen_error_becomes_internal_and_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        assert _reason(ValueError("x")).code == "internal"
    assert logs[0]["log_level"] == "error"
    assert isinstance(logs[0]["exc_info"], ValueError)
