"""`GET /metrics` over HTTP, on a loopback port or a local socket, for Prometheus."""

import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import anyio
import structlog

from hearth.daemon.connections import LOOPBACK, StreamServer, listen_on_port, send_all
from hearth.daemon.door.listener import bind_file
from hearth.runtime.errors import HearthError

OPENMETRICS: Final = "application/openmetrics-text"
CONNECTIONS = 8
"""Connections that may be open at once; more are closed."""
HEAD_BYTES = 8192
"""The longest head of a request that is read."""
_UMASK = 0o117
_FRESH_S = 0.25
_READ_S = 5.0
_WRITE_S = 5.0
_WORDS = 3
_LOCAL_NAMES = {"", LOOPBACK, "localhost"}
_log = structlog.get_logger("hearth.metrics")


class Exposition(NamedTuple):
    """A page of metrics, and its content type."""

    content_type: str
    page: bytes


Form = Literal["text/plain", "application/openmetrics-text"]
Expose = Callable[[Form], Awaitable[Exposition]]
"""Makes a page in a form: Prometheus's own, or OpenMetrics."""


class Endpoint(StreamServer):
    """Answers one request a connection.

    For any number of requests it makes at most one page of a form within `_FRESH_S`.
    """

    def __init__(self, listening: socket.socket, expose: Expose) -> None:
        self._by_port = listening.family != socket.AF_UNIX
        super().__init__(listening, None if self._by_port else Path(listening.getsockname()))
        self._expose = expose
        self._making = anyio.Lock()
        self._made: dict[Form, tuple[float, Exposition]] = {}

    def _admits(self, _connection: socket.socket) -> bool:
        return self._open < CONNECTIONS

    async def _converse(self, connection: socket.socket) -> None:
        head = await _read_head(connection)
        await send_all(connection, await self._answer(head), _WRITE_S)

    async def _answer(self, head: bytes) -> bytes:
        refusal = refusal_of(head, by_port=self._by_port)
        if refusal is not None:
            return _refusal(refusal)
        try:
            return _response("200 OK", await self._page(_form_of(head)))
        except Exception:  # noqa: BLE001 - a fault in one answer must not end the service
            _log.exception("a request for metrics could not be answered")
            return _refusal("500 Internal Server Error")

    async def _page(self, form: Form) -> Exposition:
        async with self._making:
            now, made = time.monotonic(), self._made.get(form)
            if made is None or now - made[0] >= _FRESH_S:
                made = self._made[form] = now, await self._expose(form)
            return made[1]


def refusal_of(head: bytes, *, by_port: bool) -> str | None:
    """The status line's end for a request that is not answered with metrics."""
    if not head.endswith(b"\r\n\r\n"):
        whole = len(head) < HEAD_BYTES
        return "400 Bad Request" if whole else "431 Request Header Fields Too Large"
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != _WORDS or not words[2].startswith(b"HTTP/1."):
        return "400 Bad Request"
    # A page in a browser here may have its site's name resolved to this machine.
    if by_port and _fields(head).get("host", "").partition(":")[0] not in _LOCAL_NAMES:
        return "403 Forbidden"
    if words[1].partition(b"?")[0] != b"/metrics":
        return "404 Not Found"
    return None if words[0] == b"GET" else "405 Method Not Allowed"


def open_endpoints(port: int, path: str, expose: Expose) -> list[Endpoint]:
    """Open the endpoints on `port` and at `path`, 0 and '' for none. Raises `socket_unusable`."""
    listening = [listen_on_port(port, "metrics_port")] if port else []
    try:
        listening += [listen_at(path)] if path else []
    except HearthError:
        for one in listening:
            one.close()
        raise
    return [Endpoint(one, expose) for one in listening]


def listen_at(path: str) -> socket.socket:
    """Listen at a file of mode 0660; raises `socket_unusable`."""
    try:
        return bind_file(Path(path), _UMASK)
    except HearthError as error:
        raise HearthError("socket_unusable", error.message, "metrics_socket") from error


async def _read_head(connection: socket.socket) -> bytes:
    """The head of a request up to its empty line, or as much of it as is read."""
    head = b""
    with anyio.fail_after(_READ_S):
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES:
            await anyio.wait_readable(connection)
            data = connection.recv(HEAD_BYTES - len(head))
            if not data:
                return head
            head += data
    # What follows would be a body, which means nothing here.
    return head[: head.index(b"\r\n\r\n") + 4] if b"\r\n\r\n" in head else head


def _form_of(head: bytes) -> Form:
    """Form that the request accepts; no other text of the request reaches the library."""
    accepted = _fields(head).get("accept", "")
    return OPENMETRICS if OPENMETRICS in accepted else "text/plain"


def _fields(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.lower(): value.strip() for name, _, value in lines}


def _refusal(status: str) -> bytes:
    fields = "Allow: GET\r\n" if status.startswith("405") else ""
    return _response(status, Exposition("text/plain", f"{status}\n".encode()), fields)


def _response(status: str, content: Exposition, fields: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {content.content_type}\r\n"
        f"Content-Length: {len(content.page)}\r\n{fields}Connection: close\r\n\r\n"
    ).encode() + content.page
