"""Starts that end by themselves; test_ends.py has what fails later."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from hearth.daemon.configuration.load import OLD_NAMES, load_settings
from hearth.daemon.configuration.settings import Settings, replaced
from hearth.daemon.door.keys import make_server_keys
from hearth.daemon.exit_codes import CONFIGURATION, STOPPED
from hearth.daemon.service import serve

DEFAULTS = Settings()


def log_of(
    engine: Path,
    capsys: pytest.CaptureFixture[str],
    given: Settings = DEFAULTS,
    **values: str | int,
) -> str:
    """What a start says that these settings end before an actor has begun to load."""
    try:
        assert serve(replaced(given, log_format="json", **values), engine) == CONFIGURATION
    finally:
        structlog.reset_defaults()
    text = capsys.readouterr().err
    assert "actor" not in text
    return text


def test_a_missing_engine_is_logged_in_one_line_and_an_error_of_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = log_of(tmp_path / "none", capsys).splitlines()
    assert len(lines) == 1
    assert "engine_missing" in lines[0]


def test_old_names_are_told_of_at_the_start_whatever_the_log_level_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(environ={}, flags=dict.fromkeys(OLD_NAMES, "2"))
    text = log_of(tmp_path / "none", capsys, given=settings, log_level="error")
    warning = json.loads(text.splitlines()[0])
    assert (warning["level"], warning["event"]) == ("warning", "settings have other names now")
    assert warning["reason"].endswith('give draft_tree = "2x2/2"')


def test_an_unusable_socket_ends_before_anything_is_loaded(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "s")
    assert "socket_unusable" in log_of(tiny_engine, capsys, socket=place)


def test_tcp_without_keys_ends_with_the_command_that_makes_them(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, keys = short_folder / "s", str(short_folder / "keys")
    text = log_of(tiny_engine, capsys, socket=str(place), tcp_port=1, keys=keys)
    assert f"hearth keys init --keys {keys}" in text
    assert not place.exists()


@pytest.mark.parametrize("setting", ["metrics_port", "tcp_port"])
def test_a_port_that_is_taken_ends_before_anything_is_loaded(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    place, keys = short_folder / "s", short_folder / "keys"
    make_server_keys(keys)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = {"socket": str(place), "keys": str(keys), setting: port}
        text = log_of(tiny_engine, capsys, **taken)
    assert f"cannot listen on port {port} of 127.0.0.1 (Address already in" in text
    assert f'"field":"{setting}"' in text
    assert ("no client's key is listed" in text) == (setting == "tcp_port")
    assert not place.exists()


ASKED_EARLY = """
import signal, sys
from pathlib import Path
from hearth.daemon.configuration.settings import settings_of
from hearth.daemon.signals import held_signals
with held_signals() as send_again:
    signal.raise_signal(signal.SIGTERM)
    from hearth.daemon.service import serve
    settings = settings_of(socket=sys.argv[1], engine_kind="simulated", log_format="json")
    sys.exit(serve(settings, Path(sys.argv[2]), send_again=send_again))
"""


def test_a_stop_that_is_asked_for_while_a_daemon_begins_is_heard(
    tiny_engine: Path, short_folder: Path
) -> None:
    command = [sys.executable, "-c", ASKED_EARLY, str(short_folder / "s"), str(tiny_engine)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == STOPPED, ended.stderr
    assert '"event":"stopping","signal":"SIGTERM"' in ended.stderr
