"""Ports of this machine alone, and the connections of the daemon's own small servers."""

import os
import socket

import anyio
import structlog

from runtime.errors import HearthError

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
