import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Reload, Reloaded, control_path
from hearth.runtime.errors import HearthError


@contextmanager
def answering(folder: Path, answer: bytes) -> Iterator[str]:
    """A daemon that answers one line in two pieces and closes; the path of its clients' socket."""
    path = folder / "h.sock"

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(100) == b'{"t":"reload"}\n'
            half = len(answer) // 2
            connection.sendall(answer[:half])
            connection.sendall(answer[half:])

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(control_path(path)))
        listening.listen()
        thread = Thread(target=serve)
        thread.start()
        yield str(path)
        thread.join()


def refused(socket: str, timeout_s: float = 20.0) -> HearthError:
    with pytest.raises(HearthError) as caught:
        ask(Reload(), Reloaded, socket, timeout_s=timeout_s)
    return caught.value


def test_the_answer_comes_as_its_kind(short_folder: Path) -> None:
    answer = b'{"t":"reloaded","changed":["hold_s"],"needs_restart":[]}\n'
    with answering(short_folder, answer) as path:
        assert ask(Reload(), Reloaded, path) == Reloaded(["hold_s"], [])


def test_what_the_daemon_refuses_is_raised(short_folder: Path) -> None:
    with answering(
        short_folder, b'{"t":"error","code":"invalid_value","message":"m","field":"f"}\n'
    ) as path:
        error = refused(path)
    assert (error.code, error.message, error.field) == ("invalid_value", "m", "f")


def test_a_code_of_another_version_is_internal(short_folder: Path) -> None:
    with answering(short_folder, b'{"t":"error","code":"new","message":"m"}\n') as path:
        assert refused(path).code == "internal"


@pytest.mark.parametrize("answer", [b'{"t":"pong"}\n', b"\xff\n", b'{"t":"reloaded"'])
def test_other_answers_are_told(short_folder: Path, answer: bytes) -> None:
    with answering(short_folder, answer) as path:
        assert refused(path).code == "bad_message"


def test_a_connection_that_is_closed_tells_why_that_may_be(short_folder: Path) -> None:
    with answering(short_folder, b"") as path:
        assert "it stops, or you are neither the daemon's user nor root" in refused(path).message


def test_where_no_daemon_is_one_is_to_be_started(short_folder: Path) -> None:
    error = refused(str(short_folder / "h.sock"))
    assert (error.code, error.field) == ("socket_unusable", "socket")
    assert "hearth serve" in error.message


def test_a_socket_whose_name_leaves_no_room_for_another_is_told(short_folder: Path) -> None:
    path = short_folder / ("s" * (106 - len(str(short_folder)) - 1))
    assert "too long" in refused(str(path)).message


def test_a_daemon_that_does_not_answer_is_told(short_folder: Path) -> None:
    path = short_folder / "h.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(control_path(path)))
        listening.listen()
        assert "did not answer in 0.05 s" in refused(str(path), 0.05).message


def test_who_may_not_is_told_as_whom(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_one: socket.socket, _path: str) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert "the daemon's user or root" in refused(str(short_folder / "h.sock")).message


def test_the_owner_s_socket_is_no_matter_of_tcp() -> None:
    with pytest.raises(HearthError, match="beside the local one: tcp:"):
        ask(Reload(), Reloaded, "tcp://127.0.0.1:7700")
