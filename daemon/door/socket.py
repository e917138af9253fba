"""A ROUTER that clients talk to: bounded receives, sends that never wait."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import zmq

from daemon.door.listener import CREDENTIALS
from daemon.door.settings import DoorSettings

Sent = Literal["sent", "full", "gone"]
# Frames up to this multiple of the limit are answered; beyond, ZeroMQ closes the connection.
_ANSWERED_SIZE = 2
_FLUSH_MS = 500


class Received(NamedTuple):
    """One message: who sent it, whether an empty delimiter came first, its first frame.

    `connection` is a number that no other connection gets, whatever a client calls itself. `frames`
    counts all frames after the delimiter. Those behind the first are `pictures`, as they were
    received, and as many as one message may have. `peer` is who has connected: `uid:N` on the local
    socket, `key:PUBLICKEY` on TCP. `key` is the public key that the connection has shown, and
    `name` that of its owner; '' on the local socket.
    """

    connection: int
    delimited: bool
    data: bytes
    frames: int
    pictures: Sequence[memoryview] = ()
    peer: str = ""
    key: str = ""
    name: str = ""


class Listening(Protocol):
    """Where a socket listens, and its end."""

    endpoint: str

    def duplicate(self) -> int:
        """Another descriptor of the listening socket, for an owner who closes it."""

    def close(self) -> None:
        """Listen no more."""


class DoorSocket:
    """A ROUTER in mandatory mode on a listener, which it owns; owned by one thread."""

    def __init__(self, listener: Listening, settings: DoorSettings, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._known: dict[bytes, tuple[int, str]] = {}
        self._routing_ids: dict[int, bytes] = {}
        self._listener = listener
        self._options = _options(settings)
        self._pictures = settings.images
        self._open()

    @property
    def descriptors(self) -> list[int]:
        """Tell of changes: drain `receive` before a wait for them, and after every `send`."""
        return [self._socket.FD]

    def reopen(self) -> None:
        """Close all connections and listen anew; what ZeroMQ held for them is free afterwards."""
        self._shut(0)
        self._open()

    def receive(self) -> Received | None:
        """The next message, None when there is none now."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        rest = self._rest()
        connection, peer = self._known.get(frame.bytes) or self._know(frame)
        return Received(connection, *rest, peer)

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Send one frame to a connection without waiting: it may be full, or gone."""
        identity = self._routing_ids[connection]
        parts = [identity, b"", data] if delimited else [identity, data]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def close(self) -> None:
        """Stop listening, and let the last answers leave."""
        self._listener.close()
        self._shut(_FLUSH_MS)

    def _know(self, frame: zmq.Frame) -> tuple[int, str]:
        connection = next(self._numbers)
        self._routing_ids[connection] = frame.bytes
        self._known[frame.bytes] = known = connection, self._peer(frame)
        return known

    def _peer(self, frame: zmq.Frame) -> str:
        try:
            with socket.socket(fileno=os.dup(int(frame.get(zmq.SRCFD)))) as peer:
                found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                return f"uid:{CREDENTIALS.unpack(found)[1]}"
        except (OSError, zmq.ZMQError):
            # It has left meanwhile, or speaks so old a protocol that ZeroMQ does not say.
            return ""

    def _open(self) -> None:
        # A context of its own: its end waits until all memory of the connections is free.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in self._options.items():
            self._socket.setsockopt(option, value)
        self._prepare()
        # ZeroMQ neither makes nor removes the file of a descriptor that it was given.
        self._socket.setsockopt(zmq.USE_FD, self._listener.duplicate())
        self._socket.bind(self._listener.endpoint)

    def _prepare(self) -> None:
        """Set what else the socket needs before it listens."""

    def _shut(self, linger_ms: int) -> None:
        self._socket.close(linger=linger_ms)
        self._context.term()

    def _rest(self) -> tuple[bool, bytes, int, Sequence[memoryview]]:
        """Whether a delimiter came, the first frame, the count of frames, and those of pictures."""
        more = self._socket.getsockopt(zmq.RCVMORE)
        first = self._socket.recv(zmq.NOBLOCK) if more else b""
        frames = int(bool(more))
        more = self._socket.getsockopt(zmq.RCVMORE)
        delimited = bool(more) and not first
        if delimited:
            first = self._socket.recv(zmq.NOBLOCK)
            more = self._socket.getsockopt(zmq.RCVMORE)
        if not more:
            return delimited, first, frames, ()
        pictures = []
        while self._socket.getsockopt(zmq.RCVMORE):
            picture = self._socket.recv(zmq.NOBLOCK, copy=False)
            if frames <= self._pictures:
                pictures.append(picture.buffer)
            frames += 1
        return delimited, first, frames, pictures


def _options(settings: DoorSettings) -> dict[int, int]:
    return {
        zmq.ROUTER_MANDATORY: 1,
        zmq.MAXMSGSIZE: _ANSWERED_SIZE * max(settings.frame_bytes, settings.image_bytes),
        zmq.SNDHWM: settings.send_mark,
        zmq.RCVHWM: settings.receive_mark,
        zmq.HANDSHAKE_IVL: round(settings.handshake_s * 1000),
        # The kernel tells of a peer's death; a heartbeat would only cut off one that is paused.
        zmq.HEARTBEAT_IVL: 0,
        zmq.LINGER: 0,
    }
