"""The owner's socket: JSON lines from the daemon's own user or root, one answer to each."""

import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import structlog

from hearth.daemon.connections import StreamServer, send_all
from hearth.daemon.control.messages import LINE_BYTES, ControlAnswer, ControlError, ControlRequest
from hearth.daemon.door.listener import bind_file
from hearth.runtime.errors import HearthError

Handler = Callable[[Any], Awaitable[ControlAnswer]]

CONNECTIONS = 16
"""Connections that may be open at once."""
_UMASK = 0o177
_READ_S = 30.0
"""Seconds that a connection may stay without a request."""
_ANSWER_S = 60.0
_WRITE_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid: struct ucred, unix(7)
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_log = structlog.get_logger("hearth.control")


class _Known(NamedTuple):
    decoder: msgspec.json.Decoder[Any]
    handler: Handler


class _Kind(msgspec.Struct, frozen=True):
    t: str


class ControlServer(StreamServer):
    """Answers the requests that have a handler; the socket is opened by the constructor.

    Whoever constructs it holds the lock of the clients' socket, so that one process at a time has
    `path`. Raises `socket_unusable` or `already_running`. A HearthError of a handler is answered.
    """

    def __init__(self, path: Path, handlers: Mapping[type[ControlRequest], Handler]) -> None:
        self._known = {
            str(kind.__struct_config__.tag): _Known(msgspec.json.Decoder(kind), handler)
            for kind, handler in handlers.items()
        }
        super().__init__(bind_file(path, _UMASK), path)

    def _admits(self, connection: socket.socket) -> bool:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(peer)
        if user not in (0, os.geteuid()):
            _log.warning("a stranger was turned away", user=user, process=process)
            return False
        return True

    async def _converse(self, connection: socket.socket) -> None:
        if self._open > CONNECTIONS:
            text = f"there are {CONNECTIONS} connections already: close one"
            await _write(connection, ControlError("too_many_clients", text))
            return
        unread = bytearray()
        try:
            while (line := await _read_line(connection, unread)) is not None:
                await _write(connection, await self._answer(line))
        except HearthError as error:
            await _write(connection, _as_answer(error))

    async def _answer(self, line: bytes) -> ControlAnswer:
        try:
            known, request = self._decode(line)
            with anyio.fail_after(_ANSWER_S):
                return await known.handler(request)
        except HearthError as error:
            return _as_answer(error)
        except TimeoutError:
            return ControlError("deadline_exceeded", f"it took longer than {_ANSWER_S:g} s")
        except Exception:  # noqa: BLE001 - a fault in one answer must not end the service
            _log.exception("a control request could not be handled")
            return ControlError("internal", "the daemon failed at it, its log tells why")

    def _decode(self, line: bytes) -> tuple[_Known, ControlRequest]:
        try:
            kind = msgspec.json.decode(line, type=_Kind).t
        except _DECODE_ERRORS:
            text = 'a request is one line of JSON such as {"t": "reload"}'
            raise HearthError("bad_message", text) from None
        known = self._known.get(kind)
        if known is None:
            text = f"this daemon knows no request {kind[:40]!r}: is it of another version?"
            raise HearthError("unknown_message", text, "t")
        try:
            return known, known.decoder.decode(line)
        except _DECODE_ERRORS:
            names = ", ".join(known.decoder.type.__struct_fields__) or "none"
            text = f"the fields of {kind!r} are other ones, or of other kinds (it has: {names})"
            raise HearthError("bad_message", text) from None


async def _read_line(connection: socket.socket, unread: bytearray) -> bytes | None:
    """The next line; None at the end. Raises `message_too_large`, and TimeoutError."""
    with anyio.fail_after(_READ_S):
        while (end := unread.find(b"\n")) < 0:
            if len(unread) >= LINE_BYTES:
                text = f"a request has at most {LINE_BYTES} bytes"
                raise HearthError("message_too_large", text)
            await anyio.wait_readable(connection)
            data = connection.recv(LINE_BYTES - len(unread))
            if not data:
                return None
            unread += data
    line = bytes(unread[:end])
    del unread[: end + 1]
    return line


async def _write(connection: socket.socket, answer: ControlAnswer) -> None:
    await send_all(connection, msgspec.json.encode(answer) + b"\n", _WRITE_S)


def _as_answer(error: HearthError) -> ControlError:
    return ControlError(error.code, error.message, error.field)
