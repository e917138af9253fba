"""The listening socket and its connections, each of them Hypercorn's."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable

import msgspec
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hearth_http.errors import UNAVAILABLE, ApiError

_HEADER_BYTES = 32 << 10
_HEADER_S = 5
"""Seconds for the headers of a request, and until the next one of a connection."""
_READ_S = 60.0
"""Seconds that a program may leave what it was sent unread."""
_LAST_S = 2.0
"""Seconds for the last answers, once nothing runs any more."""


class Server:
    """Connections of one listening socket, `most` at a time.

    A connection beyond is told 503 at once: it would wait in the system's queue without a word.
    """

    def __init__(self, app: ASGIApp, most: int, drain_s: float) -> None:
        self._app, self._most, self._drain_s = app, most, drain_s
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._context = WorkerContext(None)
        self._config = Config()
        self._config.h11_max_incomplete_size = _HEADER_BYTES
        self._config.h2_max_header_list_size = _HEADER_BYTES
        self._config.keep_alive_timeout = _HEADER_S
        self._config.include_server_header = False

    async def run(
        self,
        listener: socket.socket,
        ready: Callable[[], None],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve until SIGTERM or SIGINT; what is open then has `drain_s` to end, until `close`."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        server = await asyncio.start_server(self._connected, sock=listener)
        ready()
        await stopped.wait()
        server.close()
        # Connections between two requests end by it, others after their answer.
        await self._context.terminated.set()
        await self._wait(self._drain_s)
        # It ends the sessions, so that what still runs is answered with that.
        await close()
        await self._wait(_LAST_S)
        for writer in self._open.values():
            writer.transport.abort()
        await self._wait(_LAST_S)

    async def _wait(self, seconds: float) -> None:
        if self._open:
            await asyncio.wait(self._open, timeout=seconds)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._most:
            writer.write(_busy())
            writer.close()
            return
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served by a task")
        self._open[task] = writer
        task.add_done_callback(self._open.pop)
        app = ASGIWrapper(_patient(self._app, writer))  # type: ignore[arg-type] # dicts of other names
        loop = asyncio.get_running_loop()
        await TCPServer(app, loop, self._config, self._context, {}, reader, writer)


def _busy() -> bytes:
    error = ApiError(UNAVAILABLE, "too_many_clients", "too many connections are open", again=True)
    body = msgspec.json.encode(error.openai)
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: 1"
    return b"HTTP/1.1 503 Busy\r\n%b\r\nconnection: close\r\n\r\n%b" % (head.encode(), body)


def _patient(app: ASGIApp, writer: asyncio.StreamWriter) -> ASGIApp:
    """The application, whose connection ends where the other side does not read."""
    loop = asyncio.get_running_loop()

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            timer = loop.call_later(_READ_S, writer.transport.abort)
            try:
                await send(message)
            finally:
                timer.cancel()

        await app(scope, receive, sent)

    return patient
