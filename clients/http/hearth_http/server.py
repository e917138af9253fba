"""The listening socket and its connections, each of them Hypercorn's."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

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

Gone = asyncio.Future[None]


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
        server = await loop.create_server(self._protocol, sock=listener)
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

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = _Reader()
        return asyncio.StreamReaderProtocol(reader, partial(self._connected, reader.gone))

    def _connected(
        self, gone: Gone, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._open) >= self._most:
            writer.write(_busy())
            writer.close()
            return
        loop = asyncio.get_running_loop()
        app = ASGIWrapper(_patient(self._app, gone, writer))  # type: ignore[arg-type] # other dicts
        serving = TCPServer(app, loop, self._config, self._context, {}, reader, writer)
        task = loop.create_task(_served(serving, gone))
        self._open[task] = writer
        task.add_done_callback(self._open.pop)


async def _served(connection: TCPServer, gone: Gone) -> None:
    async def end_idling() -> None:
        # Else it would count as open for as long as a connection may be idle.
        await gone
        await connection.idle_task.stop()

    ending = asyncio.ensure_future(end_idling())
    try:
        await connection
    finally:
        ending.cancel()


class _Reader(asyncio.StreamReader):
    """Bytes of a connection; `gone` is done once the other side sends no more."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: Gone = asyncio.get_running_loop().create_future()

    def feed_eof(self) -> None:
        super().feed_eof()
        if not self.gone.done():
            self.gone.set_result(None)


def _busy() -> bytes:
    error = ApiError(UNAVAILABLE, "too_many_clients", "too many connections are open", again=True)
    body = msgspec.json.encode(error.openai)
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: 1"
    return b"HTTP/1.1 503 Busy\r\n%b\r\nconnection: close\r\n\r\n%b" % (head.encode(), body)


def _patient(app: ASGIApp, gone: Gone, writer: asyncio.StreamWriter) -> ASGIApp:
    """The application, whose connection ends where the other side does not read.

    That it is gone is told also where a further request, which waits its turn, lies before that.
    """
    loop = asyncio.get_running_loop()

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            message = asyncio.ensure_future(receive())
            either: list[asyncio.Future[Any]] = [message, gone]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                return message.result() if message.done() else {"type": "http.disconnect"}
            finally:
                message.cancel()

        async def sent(message: Message) -> None:
            timer = loop.call_later(_READ_S, writer.transport.abort)
            try:
                await send(message)
            finally:
                timer.cancel()

        await app(scope, received, sent)

    return patient
