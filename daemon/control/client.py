"""Control client of a command: one request, one answer, over the owner's socket."""

import os
import socket as sockets
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from hearth.daemon.control.messages import ControlAnswer, ControlError, ControlRequest, control_path
from hearth.runtime.errors import HearthError, known_code
from hearth_client.address import resolve_address
from hearth_client.errors import HearthClientError

Answer = TypeVar("Answer", bound=ControlAnswer)
_ANSWER_BYTES = 64 << 20
_CHUNK = 64 << 10


def ask(
    request: ControlRequest,
    kind: type[Answer],
    socket: str | None = None,
    *,
    timeout_s: float = 70.0,
) -> Answer:
    """Ask the daemon whose clients use `socket` (None: the agreed place); blocks `timeout_s`.

    Raises HearthError: what the daemon refused, or `socket_unusable` where it cannot be asked.
    """
    path = _path_of(socket)
    deadline = time.monotonic() + timeout_s
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = _read_line(connection, deadline)
    except PermissionError as error:
        raise _unreachable(f"not allowed to use {path}: run it as the daemon's user or root") from (
            error
        )
    except TimeoutError as error:
        raise _unreachable(f"the daemon at {path} did not answer in {timeout_s:g} s") from error
    except OSError as error:
        raise _unreachable(
            f"no daemon can be asked at {path} ({error.strerror or error}): start one with "
            "hearth serve, or name the socket of its clients with --socket"
        ) from error
    return _decode(line, kind, path)


def _path_of(socket: str | None) -> Path:
    try:
        address = resolve_address(socket)
    except HearthClientError as error:
        raise _unreachable(str(error)) from error
    if not address.startswith("ipc://"):
        raise _unreachable(f"the owner's socket is beside the local one: {address} has none")
    return control_path(Path(address.removeprefix("ipc://")))


def _read_line(connection: sockets.socket, deadline: float) -> bytes:
    """All up to the end of the first line, or of the connection."""
    read = bytearray()
    while not read.endswith(b"\n") and len(read) < _ANSWER_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data = connection.recv(_CHUNK)
        if not data:
            break
        read += data
    return bytes(read)


def _decode(line: bytes, kind: type[Answer], path: Path) -> Answer:
    if not line:
        raise _unreachable(
            f"the daemon at {path} closed the connection without an answer: it stops, or you are "
            "neither the daemon's user nor root"
        )
    try:
        answer: Answer | ControlError = msgspec.json.decode(line, type=kind | ControlError)
    except msgspec.MsgspecError as error:
        raise HearthError("bad_message", f"{path} answers otherwise than a daemon does") from error
    if isinstance(answer, ControlError):
        raise HearthError(known_code(answer.code), answer.message, answer.field)
    return answer


def _unreachable(text: str) -> HearthError:
    return HearthError("socket_unusable", text, "socket")
