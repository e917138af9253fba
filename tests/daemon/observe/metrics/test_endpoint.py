import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import pytest

from hearth.daemon.connections import listen_on_port
from hearth.daemon.observe.metrics import endpoint as module
from hearth.daemon.observe.metrics.endpoint import (
    CONNECTIONS,
    HEAD_BYTES,
    OPENMETRICS,
    Endpoint,
    Expose,
    Exposition,
    Form,
    open_endpoints,
    refusal_of,
)
from hearth.runtime.errors import HearthError


async def page(form: Form) -> Exposition:
    return Exposition("text/x", f"as {form}\n".encode())


@asynccontextmanager
async def serving(path: Path, expose: Expose = page) -> AsyncIterator[Path]:
    (endpoint,) = open_endpoints(0, str(path), expose)
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
        got = await answer(
            path, head("GET /metrics HTTP/1.1", Host="localhost", Accept="text/plain;q=1")
        )
        got_again = await answer(path, head("GET /metrics?x=1 HTTP/1.0"))
    first, _, body = got.partition(b"\r\n\r\n")
    assert first.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/x",
        b"Content-Length: 14",
        b"Connection: close",
    ]
    assert body == b"as text/plain\n"
    assert got_again.endswith(b"as text/plain\n")
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
    assert (refusal_of(request_head, by_port=True) or "").startswith(status)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "localhost:1"])
def test_names_of_this_machine_may_ask(host: str) -> None:
    assert refusal_of(head("GET /metrics HTTP/1.1", HOST=host), by_port=True) is None


def test_at_a_socket_any_name_may_stand() -> None:
    assert refusal_of(head("GET /metrics HTTP/1.1", Host="hearth"), by_port=False) is None


def test_no_head_raises() -> None:
    random = Random(7)
    good = head("GET /metrics HTTP/1.1", Host="localhost:1", Accept="*/*")
    answers = set()
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(random.randrange(1, 6)):
            bad[random.randrange(len(bad))] = random.choice(b"\r\n :/GH1\0\xff")
        answers.add(refusal_of(bytes(bad), by_port=True))
    assert {one[:3] for one in answers if one} >= {"400", "403", "404", "405"}
    assert None in answers


async def test_refusals_are_answered_and_the_next_is_served(short_folder: Path) -> None:
    async with serving(short_folder / "m") as path:
        refused = await answer(path, head("PUT /metrics HTTP/1.1"))
        long = await answer(path, b"G" * HEAD_BYTES)
        good = await answer(path, head("GET /metrics HTTP/1.1"))
    assert b"\r\nAllow: GET\r\n" in refused
    assert long.startswith(b"HTTP/1.1 431")
    assert good.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", b"text/plain"),
        ("*/*", b"text/plain"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", OPENMETRICS.encode()),
        ("application/openmetrics-text;version=abc", OPENMETRICS.encode()),
    ],
)
async def test_the_form_is_the_one_that_is_accepted(
    short_folder: Path, accept: str, form: bytes
) -> None:
    async with serving(short_folder / "m") as path:
        got = await answer(path, head("GET /metrics HTTP/1.1", Accept=accept))
    assert got.endswith(b"as " + form + b"\n")


async def test_a_page_that_cannot_be_made_is_answered_and_the_next_is_served(
    short_folder: Path,
) -> None:
    asked: list[Form] = []

    async def expose(form: Form) -> Exposition:
        asked.append(form)
        if len(asked) == 1:
            raise ValueError("at fault")
        return await page(form)

    async with serving(short_folder / "m", expose) as path:
        failed = await answer(path, head("GET /metrics HTTP/1.1"))
        good = await answer(path, head("GET /metrics HTTP/1.1"))
    assert failed.startswith(b"HTTP/1.1 500")
    assert b"at fault" not in failed
    assert good.startswith(b"HTTP/1.1 200")


async def test_who_asks_without_pause_gets_the_page_that_there_is(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRESH_S", 3600)
    asked: list[Form] = []

    async def expose(form: Form) -> Exposition:
        asked.append(form)
        return await page(form)

    async with serving(short_folder / "m", expose) as path:
        for _ in range(3):
            for accept in ("", OPENMETRICS):
                await answer(path, head("GET /metrics HTTP/1.1", Accept=accept))
        assert asked == ["text/plain", OPENMETRICS]
        monkeypatch.setattr(module, "_FRESH_S", 0)
        await answer(path, head("GET /metrics HTTP/1.1"))
    assert len(asked) == 3


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
    again = listen_on_port(port, "metrics_port")
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
