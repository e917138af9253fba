"""Connections of the daemon's own small servers: taken and written to without a thread."""

import socket

import anyio
import structlog

_PAUSE_S = 0.1
_log = structlog.get_logger("hearth")


async def accept(listening: socket.socket) -> socket.socket:
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


async def send_all(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Write all of it; raises OSError, and TimeoutError when it takes longer."""
    left = memoryview(data)
    with anyio.fail_after(seconds):
        while left:
            await anyio.wait_writable(connection)
            left = left[connection.send(left) :]
