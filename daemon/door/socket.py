"""The one ROUTER that clients talk to: bounded receives, sends that never wait."""

from typing import Literal, NamedTuple

import anyio
import zmq

from actors.mailbox import ZmqContext
from daemon.door.listener import Listener
from daemon.door.settings import DoorSettings

Sent = Literal["sent", "full", "gone"]
# Frames up to this multiple of the limit are answered; beyond, ZeroMQ closes the connection.
_ANSWERED_SIZE = 2
_HEARTBEAT_S = 10.0
_FLUSH_MS = 500


class Received(NamedTuple):
    """One message: who sent it, whether an empty delimiter came first, its first frame.

    `frames` counts all frames after identity and delimiter; only the first is kept.
    """

    identity: bytes
    delimited: bool
    data: bytes
    frames: int


class DoorSocket:
    """A ROUTER in mandatory mode on a listener; owned by one thread."""

    def __init__(self, context: ZmqContext, listener: Listener, settings: DoorSettings) -> None:
        self._listener = listener
        self._socket = context.socket(zmq.ROUTER)
        for option, value in _options(settings).items():
            self._socket.setsockopt(option, value)
        # ZeroMQ neither makes nor removes the file of a descriptor that it was given.
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(f"ipc://{listener.path}")

    def receive(self) -> Received | None:
        """The next message, None when there is none now."""
        try:
            identity = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        data, frames, delimited = self._rest()
        return Received(identity, delimited, data, frames)

    def send(self, identity: bytes, data: bytes, *, delimited: bool) -> Sent:
        """Send one frame to a connection without waiting: it may be full, or gone."""
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

    async def wait(self) -> None:
        """Wait for news; the caller drains `receive` before and after, and after every send.

        The descriptor tells of changes only, and a send may take such a change for itself.
        """
        await anyio.wait_readable(self._socket.FD)

    def close(self) -> None:
        """Stop listening, let the last answers leave, and remove the socket file."""
        self._socket.close(linger=_FLUSH_MS)
        self._listener.close()

    def _rest(self) -> tuple[bytes, int, bool]:
        """First frame, count of frames, and whether a delimiter came before them."""
        first, frames, delimited = b"", 0, False
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(zmq.NOBLOCK)
            if frames == 0 and not delimited and not frame and self._socket.getsockopt(zmq.RCVMORE):
                delimited = True
                continue
            if frames == 0:
                first = frame
            frames += 1
        return first, frames, delimited


def _options(settings: DoorSettings) -> dict[int, int]:
    return {
        zmq.ROUTER_MANDATORY: 1,
        zmq.MAXMSGSIZE: _ANSWERED_SIZE * settings.frame_bytes,
        zmq.SNDHWM: settings.send_mark,
        zmq.RCVHWM: settings.receive_mark,
        zmq.HANDSHAKE_IVL: round(settings.handshake_s * 1000),
        zmq.HEARTBEAT_IVL: round(_HEARTBEAT_S * 1000),
        zmq.HEARTBEAT_TIMEOUT: round(settings.lease_s * 1000),
        zmq.LINGER: 0,
    }
