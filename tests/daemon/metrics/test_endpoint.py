import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from daemon.metrics import endpoint as module
from daemon.metrics.endpoint import (
    CONNECTIONS,
    HEAD_BYTES,
    Endpoint,
    Exposition,
    listen_on_port,
    open_endpoints,
    refusal_of,
)
from runtime.errors import HearthError


async def page(accept: str) -> Exposition:
    if accept == "fail":
        raise ValueError("at fault")
    return Exposition("text/x", f"accept {accept}\n".encode())


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Path]:
    (endpoint,) = open_endpoints(0, str(path), page)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endpoint.run)
        yield path
        await endpoint.stop()


async def answer(path: Path, request: bytes) -> bytes:
    with anyio.fail_after(20):
        async with await anyio.connect_unix(path) as stream:
            await stream.send(request)
            return b"".join([data async for data in stream])


def head(first: str, **fields: str) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


async def test_metrics_are_got_with_their_type(short_folder: Path) -> None:
    async with serving(short_folder / "m") as path:
        assert path.stat().st_mode & 0o777 == 0o660
        got = await answer(path, head("GET /metrics HTTP/1.1", Host="localhost", Accept="a;b"))
        got_again = await answer(path, head("GET /metrics?x=1 HTTP/1.0"))
    first, _, body = got.partition(b"\r\n\r\n")
    assert first.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/x",
        b"Content-Length: 11",
        b"Connection: close",
    ]
    assert body == b"accept a;b\n"
    assert got_again.endswith(b"accept \n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("GET / HTTP/1.1"), "404"),
        (head("GET /metrics/x HTTP/1.1"), "404"),
        (head("POST /metrics HTTP/1.1"), "405"),
        (head("HEAD /metrics HTTP/1.1"), "405"),
        (head("GET /metrics HTTP/1.1", Host="rebound.example:9000"), "403"),
        (head("GET /metrics HTTP/2"), "400"),
        (head("nonsense"), "400"),
        (b"\r\n\r\n", "400"),
        (b"\xff\xfe\x00\r\n\r\n", "400"),
        (b"GET /metr", "400"),
        (b"G" * HEAD_BYTES, "431"),
    ],
)
def test_anything_else_is_refused(request_head: bytes, status: str) -> None:
    assert (refusal_of(request_head) or "").startswith(status)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "localhost:1"])
def test_names_of_this_machine_may_ask(host: str) -> None:
    assert refusal_of(head("GET /metrics HTTP/1.1", HOST=host)) is None


async def test_refusals_and_faults_are_answered_and_the_next_is_served(short_folder: Path) -> None:
    async with serving(short_folder / "m") as path:
        refused = await answer(path, head("PUT /metrics HTTP/1.1"))
        failed = await answer(path, head("GET /metrics HTTP/1.1", Accept="fail"))
        long = await answer(path, b"G" * HEAD_BYTES)
        good = await answer(path, head("GET /metrics HTTP/1.1"))
    assert b"\r\nAllow: GET\r\n" in refused
    assert failed.startswith(b"HTTP/1.1 500")
    assert long.startswith(b"HTTP/1.1 431")
    assert good.startswith(b"HTTP/1.1 200")


async def test_connections_that_say_nothing_are_few_and_end(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_S", 0.3)
    async with serving(short_folder / "m") as path:
        idle = [await anyio.connect_unix(path) for _ in range(CONNECTIONS)]
        with anyio.fail_after(20):
            assert await answer(path, b"") == b""
            for one in idle:
                async with one:
                    assert b"".join([data async for data in one]) == b""
        assert b"200 OK" in await answer(path, head("GET /metrics HTTP/1.1"))


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HearthError, match=f"port {port}") as caught:
            open_endpoints(port, "", page)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "metrics_port")


def test_a_path_that_cannot_be_is_refused_and_the_port_given_back(short_folder: Path) -> None:
    (short_folder / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(HearthError, match="not a socket") as caught:
        open_endpoints(port, str(short_folder / "file"), page)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "metrics_socket")
    again = listen_on_port(port)
    assert again.getsockname() == ("127.0.0.1", port)
    again.close()


def test_none_is_opened_unasked() -> None:
    assert open_endpoints(0, "", page) == []


async def test_an_endpoint_is_closed_once(short_folder: Path) -> None:
    (endpoint,) = open_endpoints(0, str(short_folder / "m"), page)
    assert isinstance(endpoint, Endpoint)
    endpoint.close()
    (short_folder / "m").write_text("of somebody else")
    endpoint.close()
    assert (short_folder / "m").exists()
