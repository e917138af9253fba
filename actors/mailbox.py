from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import zmq

from hearth.runtime.errors import HearthError

if TYPE_CHECKING:
    from typing_extensions import Self

ZmqContext = zmq.Context[zmq.Socket[bytes]]
T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of one encoded message; larger ones are refused by the sender."""
IPC_SCHEME = "ipc://"
_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 500
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
# A reader that always finds messages still yields to its event loop after this many.
_BURST = 32
# Decoding hostile bytes raises these; the last two are not in msgspec's own error family.
_DECODE_ERRORS = (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MailboxFull(HearthError):  # noqa: N818 - the name that all actors share
    """The receiving actor is behind by its limit of messages; code `queue_full`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("queue_full", f"the mailbox {endpoint} is full: try again later")


class _End:
    """A bounded socket of one kind; closed at the end of its `with`."""

    def __init__(self, context: ZmqContext, kind: int, limit: int) -> None:
        if limit < 1:
            raise HearthError("invalid_value", "a mailbox holds at least 1 message", "limit")
        self._socket = context.socket(kind)
        self._socket.set_hwm(limit)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this end; a second time does nothing."""
        self._socket.close()

    @property
    def descriptor(self) -> int:
        """Edge-triggered descriptor: readable when a message can be received or sent."""
        return self._socket.FD

    async def _wait_for(self, event: int) -> None:
        # The descriptor is edge-triggered: it tells of changes since EVENTS was last read.
        while not int(self._socket.getsockopt(zmq.EVENTS)) & event:
            await anyio.wait_readable(self._socket.FD)


class Receiver(_End, Generic[T]):
    """The receiving end of a mailbox: a bounded one-way pipe; exactly one thread may own it.

    It listens at every one of `endpoints` and decodes into `kind`, a message type or union of
    them; what does not decode is counted in `undecodable` and dropped. At most `limit` messages of
    each sender wait here. Raises `socket_unusable` for a bad endpoint.
    """

    def __init__(
        self, context: ZmqContext, endpoints: Sequence[str], kind: Any, limit: int
    ) -> None:
        super().__init__(context, zmq.PULL, limit)
        self.undecodable = 0
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._bound: list[Path] = []
        self._burst = 0
        try:
            for endpoint in endpoints:
                self._listen(endpoint)
        except HearthError:
            self.close()
            raise

    def receive_nowait(self) -> T | None:
        """The next message; None if there is none now."""
        while True:
            # Asking is twice as fast as being refused, which happens between all steps.
            if not int(self._socket.get(_EVENTS)) & _POLLIN:
                return None
            try:
                return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except _DECODE_ERRORS:
                self.undecodable += 1

    async def receive(self) -> T:
        """The next message; a cancelled wait loses none."""
        if self._burst >= _BURST:
            self._burst = 0
            await anyio.lowlevel.checkpoint()
        while True:
            message = self.receive_nowait()
            if message is not None:
                self._burst += 1
                return message
            self._burst = 0
            await self._wait_for(zmq.POLLIN)

    def close(self) -> None:
        """Close this end and remove its socket files."""
        super().close()
        for path in self._bound:
            path.unlink(missing_ok=True)
        self._bound.clear()

    def _listen(self, endpoint: str) -> None:
        check_endpoint(endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise HearthError(
                "socket_unusable",
                f"cannot listen at {endpoint} ({os.strerror(error.errno or 0)}): "
                "name a folder that exists and can be written",
                "endpoint",
            ) from error
        if endpoint.startswith(IPC_SCHEME):
            self._bound.append(Path(endpoint.removeprefix(IPC_SCHEME)))


class Sender(_End, Generic[T]):
    """The sending end of a mailbox; exactly one thread may own it.

    The receiving end may open later. At most `limit` messages wait here. When this end is closed,
    the end of the context waits `flush_s` seconds for what has not left yet. Raises
    `socket_unusable` for a bad endpoint.
    """

    def __init__(
        self, context: ZmqContext, endpoint: str, limit: int, flush_s: float = 0.0
    ) -> None:
        check_endpoint(endpoint)
        super().__init__(context, zmq.PUSH, limit)
        self._endpoint = endpoint
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting = 0
        self._turn = anyio.Lock()
        self._socket.setsockopt(zmq.LINGER, _milliseconds(flush_s))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            text = f"{endpoint!r} is no address of a mailbox ({os.strerror(error.errno or 0)})"
            raise HearthError("socket_unusable", text, "endpoint") from error

    def post(self, message: T) -> None:
        """Send without waiting; raises MailboxFull when the limit is reached."""
        # A sender that waits comes first: order is kept and its wake-up is not taken from it.
        if self._waiting or not self._try_send(self._encode(message)):
            raise MailboxFull(self._endpoint)

    async def send(self, message: T, timeout_s: float) -> None:
        """Send, waiting while the mailbox is full; raises MailboxFull after `timeout_s` seconds."""
        data = self._encode(message)
        if not self._waiting and self._try_send(data):
            return
        self._waiting += 1
        try:
            with anyio.move_on_after(timeout_s):
                async with self._turn:
                    while not self._try_send(data):
                        await self._wait_for(zmq.POLLOUT)
                    return
        finally:
            self._waiting -= 1
        raise MailboxFull(self._endpoint)

    def send_blocking(self, message: T, timeout_s: float) -> None:
        """Send, blocking the thread while it is full; raises MailboxFull after `timeout_s`."""
        data = self._encode(message)
        deadline = time.monotonic() + timeout_s
        while not self._try_send(data):
            left = deadline - time.monotonic()
            if left <= 0:
                raise MailboxFull(self._endpoint)
            self._socket.poll(_milliseconds(left), zmq.POLLOUT)

    def _encode(self, message: T) -> bytes:
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise HearthError(
                "invalid_value",
                f"a message to {self._endpoint} takes {len(data)} bytes, "
                f"at most {MAX_MESSAGE_BYTES} can be sent",
            )
        return data

    def _try_send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def wait_any(
    receivers: Sequence[Receiver[Any]], timeout_s: float, descriptors: Sequence[int] = ()
) -> None:
    """Block until a receiver has a message or a descriptor is readable, at most `timeout_s`."""
    poller = zmq.Poller()
    for receiver in receivers:
        poller.register(receiver._socket, zmq.POLLIN)  # noqa: SLF001 - same module
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    poller.poll(_milliseconds(timeout_s))


def check_endpoint(endpoint: str) -> None:
    """Refuse an ipc path that is too long for the system with `socket_unusable`."""
    if not endpoint.startswith(IPC_SCHEME):
        return
    size = len(os.fsencode(endpoint.removeprefix(IPC_SCHEME)))
    if size > zmq.IPC_PATH_MAX_LEN:
        raise HearthError(
            "socket_unusable",
            f"the socket path {endpoint.removeprefix(IPC_SCHEME)} has {size} bytes, at most "
            f"{zmq.IPC_PATH_MAX_LEN} are possible: choose a shorter folder",
            "endpoint",
        )


def _milliseconds(seconds: float) -> int:
    # Rounded up, so that a wait never ends before its deadline and then spins.
    return max(0, int(-(-seconds * 1000 // 1)))
