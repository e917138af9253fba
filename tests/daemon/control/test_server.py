import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from hearth.daemon.control import server as module
from hearth.daemon.control.messages import (
    LINE_BYTES,
    ControlAnswer,
    ControlRequest,
    Reload,
    Reloaded,
)
from hearth.daemon.control.server import CONNECTIONS, ControlServer
from hearth.runtime.errors import HearthError

pytestmark = pytest.mark.anyio

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


@pytest.mark.usefixtures("umask")
async def test_the_socket_is_its_owner_s_and_goes_with_the_server(short_folder: Path) -> None:
    path = short_folder / NAME
    async with serving(short_folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_two_connections_are_answered_each_for_itself(short_folder: Path) -> None:
    async with serving(short_folder), peer_in(short_folder) as one, peer_in(short_folder) as two:
        await one.send(b'{"t":"echo","te')
        await two.send(b'{"t":"echo","text":"two"}\n{"t":"echo","text":"three"}\n')
        assert await two.answer() == {"t": "echoed", "text": "two"}
        assert await two.answer() == {"t": "echoed", "text": "three"}
        await one.send(b'xt":"one"}\n')
        assert await one.answer() == {"t": "echoed", "text": "one"}


async def test_what_a_handler_refuses_is_answered_with_code_and_field(short_folder: Path) -> None:
    async with serving(short_folder), peer_in(short_folder) as peer:
        await peer.send(b'{"t":"reload"}\n')
        answer = {"code": "invalid_value", "message": "the file is wrong", "field": "clients"}
        assert await peer.answer() == {"t": "error"} | answer


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


async def test_a_line_has_a_bound(short_folder: Path) -> None:
    async with serving(short_folder), peer_in(short_folder) as peer:
        head, tail = b'{"t":"echo","text":"', b'"}\n'
        text = b"a" * (LINE_BYTES - len(head) - len(tail))
        await peer.send(head + text + tail)
        assert len((await peer.answer())["text"]) == len(text)
        await peer.send(b"a" * LINE_BYTES)
        assert (await peer.answer())["code"] == "message_too_large"
        assert await peer.ended()


async def test_a_fault_of_a_handler_is_told_and_logged(short_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving(short_folder), peer_in(short_folder) as peer:
            await peer.send(b'{"t":"echo","text":"fault"}\n{"t":"echo","text":"on"}\n')
            assert (await peer.answer())["code"] == "internal"
            assert (await peer.answer())["text"] == "on"
    assert [entry["log_level"] for entry in logs] == ["error"]


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


async def test_a_leftover_is_replaced_and_a_listener_is_not(short_folder: Path) -> None:
    path = short_folder / NAME
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(path))
    async with serving(short_folder):
        with pytest.raises(HearthError) as refused:
            ControlServer(path, {})
        assert refused.value.code == "already_running"
        assert path.exists()
