import os
import socket
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from hearth.daemon.cli import clients
from hearth.daemon.cli.clients import connected, daemon_address, explained
from hearth.daemon.cli.errors import Failure
from hearth_client import Client, ConnectionTimeout, QueueFull
from tests.daemon.door.harness import running_door


def test_the_address_is_the_flag_s_then_the_settings_then_the_agreed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "h.toml"
    file.write_text('socket = "/from/file"')
    monkeypatch.setenv("HEARTH_CONFIG", str(file))
    monkeypatch.delenv("HEARTH_SOCKET", raising=False)
    assert daemon_address("/given") == "/given"
    assert daemon_address(None) == "/from/file"
    monkeypatch.setenv("HEARTH_SOCKET", "/from/env")
    assert daemon_address(None) == "/from/env"
    monkeypatch.delenv("HEARTH_SOCKET")
    monkeypatch.delenv("HEARTH_CONFIG")
    assert daemon_address(None) is None


def test_without_a_daemon_the_failure_comes_at_once_and_says_what_to_do(
    short_folder: Path,
) -> None:
    path = short_folder / "s"
    with (
        pytest.raises(Failure, match=r"No such file.*start one with hearth serve"),
        connected(str(path)),
    ):
        pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_over:
        left_over.bind(str(path))
    with pytest.raises(Failure, match="Connection refused"), connected(str(path)):
        pass


def test_a_path_that_cannot_be_a_socket_is_a_failure() -> None:
    with pytest.raises(Failure, match="at most 107"), connected("/x" * 60):
        pass


def test_the_client_s_exceptions_become_failures() -> None:
    with pytest.raises(Failure, match=r"full \(queue_full\)"), explained():
        raise QueueFull("full")


def test_a_socket_of_others_is_not_called_a_missing_daemon(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = short_folder / "s"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Failure, match=r"not allowed .* join the group"), connected(str(path)):
        pass


def test_who_waits_is_told_and_served_once_there_is_a_daemon(
    short_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = short_folder / "s", threading.Event()
    echo = click.echo

    def say(*words: Any, **how: Any) -> None:
        echo(*words, **how)
        told.set()

    monkeypatch.setattr(click, "echo", say)
    states: list[str] = []

    def wait() -> None:
        with connected(str(path), wait=True, name="hearth-chat") as client:
            states.append(client.status().state)

    thread = threading.Thread(target=wait)
    thread.start()
    assert told.wait(10)
    with running_door(path=path):
        thread.join(20)
    assert states == ["ready"]
    assert "No such file or directory): waiting for hearth serve" in capsys.readouterr().err


@pytest.mark.parametrize("status_only", [False, True])
def test_a_daemon_that_is_started_by_its_first_client_is_waited_for(
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status_only: bool,  # noqa: FBT001 - a parameter
) -> None:
    """But not by who asks for its state."""
    path = short_folder / "s"
    made: list[Client] = []

    class Slow(Client):
        def connect(self) -> Any:
            made.append(self)
            if len(made) == 1:
                raise ConnectionTimeout("no answer")

    monkeypatch.setattr(clients, "Client", Slow)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as manager:
        manager.bind(str(path))
        manager.listen()
        if status_only:
            with pytest.raises(Failure, match="no answer"), connected(str(path), status_only=True):
                pass
        else:
            with connected(str(path)) as client:
                assert client is made[1]
            assert "waiting for the daemon to start" in capsys.readouterr().err
