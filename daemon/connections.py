"""Ports of this machine alone, and what the daemon's own small servers share."""

import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path

import anyio
import structlog

from hearth.runtime.errors import HearthError

LOOPBACK = "127.0.0.1"
_BACKLOG = 128
_PAUSE_S = 0.1
_log = structlog.get_logger("hearth")


def listen_on_port(port: int, setting: str) -> socket.socket:
    """Listen at this machine's own address alone; raises `socket_unusable` for that setting."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        reason = os.strerror(error.errno or 0)
        text = f"cannot listen on port {port} of {LOOPBACK} ({reason}): choose another, or 0"
        raise HearthError("socket_unusable", f"{text} for none", setting) from error
    return listening


class StreamServer(ABC):
    """Serves each connection to `listening` in a task of its own; owns it, and its file `path`."""

    def __init__(self, listening: socket.socket, path: Path | None) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._path = path
        self._open = 0
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    @abstractmethod
    def _admits(self, connection: socket.socket) -> bool:
        """True if a connection is to be served; others are closed."""

    @abstractmethod
    async def _converse(self, connection: socket.socket) -> None:
        """Serve one of the `_open` connections; an OSError ends it, TimeoutError among them."""

    async def run(self) -> None:
        """Serve until `stop` or cancellation."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    while True:
                        connection = await _accept(self._listening)
                        if self._admits(connection):
                            tasks.start_soon(self._serve, connection)
                        else:
                            connection.close()
        finally:
            self.close()
            self._ended.set()

    async def stop(self) -> None:
        """End `run`, and wait until the socket is closed and its file is gone."""
        self._scope.cancel()
        await self._ended.wait()

    def close(self) -> None:
        """Close the socket and remove its file; a second time does nothing."""
        self._listening.close()
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)

    async def _serve(self, connection: socket.socket) -> None:
        self._open += 1
        try:
            with connection:
                await self._converse(connection)
        except OSError as error:
            # Of the peer, or a deadline.
            _log.debug("a connection has ended", reason=str(error))
        finally:
            self._open -= 1


async def send_all(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Write all of it; raises OSError, and TimeoutError when it takes longer."""
    left = memoryview(data)
    with anyio.fail_after(seconds):
        while left:
            await anyio.wait_writable(connection)
            left = left[connection.send(left) :]


async def _accept(listening: socket.socket) -> socket.socket:
    """The next connection to a socket that does not block, nor does the connection."""
    while True:
        await anyio.wait_readable(listening)
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            continue
        except OSError as error:
            _log.warning("no connection could be taken", reason=error.strerror)
            await anyio.sleep(_PAUSE_S)
            continue
        connection.setblocking(False)
        return connection
