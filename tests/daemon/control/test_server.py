import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from hearth.daemon.control import server as module
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import (
    LINE_BYTES,
    ControlAnswer,
    ControlRequest,
    Reload,
    Reloaded,
    control_path,
)
from hearth.daemon.control.server import CONNECTIONS, ControlServer
from hearth.runtime.errors import HearthError

NAME = "h.sock.ctl"


class Echo(ControlRequest, tag="echo", frozen=True):
    text: str


class Echoed(ControlAnswer, tag="echoed", frozen=True):
    text: str


async def _reload(_asked: Reload) -> Reloaded:
    raise HearthError("invalid_value", "the file is wrong", "clients")


async def _echo(asked: Echo) -> Echoed:
    if asked.text == "fault":
        raise ValueError(asked.text)
    return Echoed(asked.text)


class Peer:
    """Bytes and lines as they are on the wire."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._unread = b""

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def ask_for_ever(self) -> None:
        while True:
            await self._stream.send(b'{"t":"echo","text":"' + b"a" * 60000 + b'"}\n')

    async def answer(self) -> dict[str, Any]:
        with anyio.fail_after(20):
            while b"\n" not in self._unread:
                self._unread += await self._stream.receive()
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(msgspec.json.decode(line))

    async def ended(self) -> bool:
        with anyio.fail_after(20), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await self._stream.receive()
        return True


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[ControlServer]:
    server = ControlServer(folder / NAME, {Reload: _reload, Echo: _echo})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        yield server
        await server.stop()


@asynccontextmanager
async def peer_in(folder: Path) -> AsyncIterator[Peer]:
    async with await anyio.connect_unix(folder / NAME) as stream:
        yield Peer(stream)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.anyio
@pytest.mark.usefixtures("umask")
async def test_the_socket_is_its_owner_s_and_goes_with_the_server(short_folder: Path) -> None:
    path = short_folder / NAME
    async with serving(short_folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@pytest.mark.anyio
async def test_two_connections_are_answered_each_for_itself(short_folder: Path) -> None:
    async with serving(short_folder), peer_in(short_folder) as one, peer_in(short_folder) as two:
        await one.send(b'{"t":"echo","te')
        await two.send(b'{"t":"echo","text":"two"}\n{"t":"echo","text":"three"}\n')
        assert await two.answer() == {"t": "echoed", "text": "two"}
        assert await two.answer() == {"t": "echoed", "text": "three"}
        await one.send(b'xt":"one"}\n')
        assert await one.answer() == {"t": "echoed", "text": "one"}


@pytest.mark.anyio
async def test_what_a_handler_refuses_is_answered_with_code_and_field(short_folder: Path) -> None:
    async with serving(short_folder), peer_in(short_folder) as peer:
        await peer.send(b'{"t":"reload"}\n')
        answer = {"code": "invalid_value", "message": "the file is wrong", "field": "clients"}
        assert await peer.answer() == {"t": "error"} | answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"t":"dance"}', "unknown_message"),
        (b'{"t":"error"}', "unknown_message"),
        (b'{"t":"echo"}', "bad_message"),
        (b'{"t":"echo","text":1}', "bad_message"),
        (b'{"t":"reload","force":true}', "bad_message"),
        (b'{"t":"echo","text":"\xff\xfe"}', "bad_message"),
        (b"\xff", "bad_message"),
        (b"", "bad_message"),
        (b"[" * 5000, "bad_message"),
    ],
)
async def test_a_line_that_is_no_request_is_refused_and_the_next_one_answered(
    short_folder: Path, line: bytes, code: str
) -> None:
    async with serving(short_folder), peer_in(short_folder) as peer:
        await peer.send(line + b"\n" + b'{"t":"echo","text":"on"}\n')
        assert (await peer.answer())["code"] == code
        assert (await peer.answer())["text"] == "on"


@pytest.mark.anyio
async def test_a_line_has_a_bound(short_folder: Path) -> None:
    async with serving(short_folder), peer_in(short_folder) as peer:
        head, tail = b'{"t":"echo","text":"', b'"}\n'
        text = b"a" * (LINE_BYTES - len(head) - len(tail))
        await peer.send(head + text + tail)
        assert len((await peer.answer())["text"]) == len(text)
        await peer.send(b"a" * LINE_BYTES)
        assert (await peer.answer())["code"] == "message_too_large"
        assert await peer.ended()


@pytest.mark.anyio
async def test_a_fault_of_a_handler_is_told_and_logged(short_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving(short_folder), peer_in(short_folder) as peer:
            await peer.send(b'{"t":"echo","text":"fault"}\n{"t":"echo","text":"on"}\n')
            assert (await peer.answer())["code"] == "internal"
            assert (await peer.answer())["text"] == "on"
    assert [entry["log_level"] for entry in logs] == ["error"]


@pytest.mark.anyio
async def test_only_the_daemon_s_user_and_root_are_heard(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = module._CREDENTIALS.pack(7, os.geteuid() + 4711, 0)
    peer_credentials = socket.socket.getsockopt

    def getsockopt(one: socket.socket, level: int, name: int, *size: int) -> Any:
        asked = (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return credentials if asked else peer_credentials(one, level, name, *size)

    with structlog.testing.capture_logs() as logs:
        async with serving(short_folder):
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, "getsockopt", getsockopt)
                async with peer_in(short_folder) as peer:
                    assert await peer.ended()
            async with peer_in(short_folder) as peer:
                await peer.send(b'{"t":"echo","text":"own"}\n')
                assert (await peer.answer())["text"] == "own"
    assert [(entry["user"], entry["process"]) for entry in logs] == [(os.geteuid() + 4711, 7)]


@pytest.mark.anyio
async def test_who_asks_nothing_or_reads_nothing_is_let_go(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_S", 0.05)
    monkeypatch.setattr(module, "_WRITE_S", 0.05)
    async with serving(short_folder):
        async with peer_in(short_folder) as silent:
            assert await silent.ended()
        async with peer_in(short_folder) as deaf:
            with anyio.fail_after(20), pytest.raises(anyio.BrokenResourceError):
                await deaf.ask_for_ever()


@pytest.mark.anyio
async def test_connections_are_bounded_and_a_place_is_free_again(short_folder: Path) -> None:
    async with serving(short_folder) as server, anyio.create_task_group() as tasks:
        full, leave = anyio.Event(), anyio.Event()
        waiting = 0

        async def hold() -> None:
            nonlocal waiting
            async with peer_in(short_folder) as peer:
                await peer.send(b'{"t":"echo","text":""}\n')
                await peer.answer()
                waiting += 1
                if waiting == CONNECTIONS:
                    full.set()
                await leave.wait()

        for _ in range(CONNECTIONS):
            tasks.start_soon(hold)
        await full.wait()
        async with peer_in(short_folder) as late:
            assert (await late.answer())["code"] == "too_many_clients"
            assert await late.ended()
        leave.set()
        while server._open:  # noqa: ASYNC110 - it tells nobody when a connection has ended
            await anyio.sleep(0.01)
        async with peer_in(short_folder) as peer:
            await peer.send(b'{"t":"echo","text":"in"}\n')
            assert (await peer.answer())["text"] == "in"


@pytest.mark.anyio
async def test_a_leftover_is_replaced_and_a_listener_is_not(short_folder: Path) -> None:
    path = short_folder / NAME
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(path))
    async with serving(short_folder):
        with pytest.raises(HearthError) as refused:
            ControlServer(path, {})
        assert refused.value.code == "already_running"
        assert path.exists()


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
