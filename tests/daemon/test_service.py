import socket
from pathlib import Path

import pytest
import structlog

from daemon.configuration.settings import Settings
from daemon.door.keys import make_server_keys
from daemon.service import serve


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


def test_tcp_without_keys_ends_with_the_command_that_makes_them(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = short_folder / "keys"
    settings = Settings(
        socket=str(short_folder / "s"), tcp_port=1, keys=str(place), log_format="json"
    )
    assert serve(settings, tiny_engine) == 78
    structlog.reset_defaults()
    text = capsys.readouterr().err
    assert f"hearth keys init --keys {place}" in text
    assert "actor" not in text
    assert not (short_folder / "s").exists()


def test_a_port_for_clients_that_is_taken_ends_before_anything_is_loaded(
    tiny_engine: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_server_keys(short_folder / "keys")
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(
            socket=str(short_folder / "s"),
            tcp_port=other.getsockname()[1],
            keys=str(short_folder / "keys"),
            log_format="json",
        )
        assert serve(settings, tiny_engine) == 78
    structlog.reset_defaults()
    text = capsys.readouterr().err
    assert f"cannot listen on port {settings.tcp_port} of 127.0.0.1 (Address already in" in text
    assert '"field":"tcp_port"' in text
    assert "no client's key is listed" in text
    assert not (short_folder / "s").exists()
