from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import zmq

from runtime.errors import HearthError

ZmqContext = zmq.Context[zmq.Socket[bytes]]
T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of one encoded message; larger ones are refused by the sender."""
IPC_SCHEME = "ipc://"
_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 500
# A reader that always finds mail still lets its event loop turn after this many messages.
_BURST = 32
# Decoding hostile bytes raises these; the last two are not in msgspec's own error family.
_DECODE_ERRORS = (
    msgspec.ValidationError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)


class MailboxFull(HearthError):  # noqa: N818 - the name that all actors share
    """The receiving actor is behind by its limit of messages; code `queue_full`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("queue_full", f"the mailbox {endpoint} is full: try again later")


@dataclass(slots=True)
class MailboxStatistics:
    """Messages since the mailbox was opened; `full` counts refused sends."""

    sent: int = 0
    received: int = 0
    full: int = 0
    undecodable: int = 0


class Mailbox(Generic[T]):
    """One end of a bounded one-way message pipe; exactly one thread may own it.

    `limit` bounds the messages waiting at each end. The receiving end decodes into `kind`, a
    message type or union of them; what does not decode is counted and dropped.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoints: Sequence[str], kind: Any, limit: int
    ) -> None:
        self.statistics = MailboxStatistics()
        self.endpoints = tuple(endpoints)
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._bound: list[Path] = []
        self._limit = limit
        self._burst = 0
        self._waiting_senders = 0
        self._turn = anyio.Lock()

    @classmethod
    def bind(
        cls, context: ZmqContext, endpoints: Sequence[str], kind: Any, limit: int
    ) -> Mailbox[T]:
        """Open the receiving end at every endpoint; raises `socket_unusable` for a bad one."""
        mailbox = cls(_open(context, zmq.PULL, limit), endpoints, kind, limit)
        try:
            for endpoint in endpoints:
                mailbox._listen(endpoint)
        except HearthError:
            mailbox.close()
            raise
        return mailbox

    @classmethod
    def connect(cls, context: ZmqContext, endpoint: str, limit: int) -> Mailbox[T]:
        """Open a sending end; the receiving end may open later."""
        check_endpoint(endpoint)
        mailbox = cls(_open(context, zmq.PUSH, limit), (endpoint,), Any, limit)
        mailbox._socket.connect(endpoint)
        return mailbox

    def receive_nowait(self) -> T | None:
        """The next message, or None when there is none now."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                message = self._decoder.decode(data)
            except _DECODE_ERRORS:
                self.statistics.undecodable += 1
                continue
            self.statistics.received += 1
            return message

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

    def wait(self, timeout_s: float) -> T | None:
        """Block the thread for the next message; None after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive_nowait()
            left = deadline - time.monotonic()
            if message is not None or left <= 0:
                return message
            self._socket.poll(_milliseconds(left), zmq.POLLIN)

    def post(self, message: T) -> None:
        """Send without waiting; raises MailboxFull when the limit is reached."""
        # A sender that waits comes first: order is kept and its wake-up is not taken from it.
        if self._waiting_senders or not self._try_send(self._encode(message)):
            self._refuse()

    async def send(self, message: T, timeout_s: float) -> None:
        """Send, waiting for room; raises MailboxFull after `timeout_s` seconds."""
        data = self._encode(message)
        if not self._waiting_senders and self._try_send(data):
            return
        self._waiting_senders += 1
        try:
            with anyio.move_on_after(timeout_s):
                async with self._turn:
                    while not self._try_send(data):
                        await self._wait_for(zmq.POLLOUT)
                    return
        finally:
            self._waiting_senders -= 1
        self._refuse()

    def send_blocking(self, message: T, timeout_s: float) -> None:
        """Send from a thread loop, blocking it for room; raises MailboxFull at the deadline."""
        data = self._encode(message)
        deadline = time.monotonic() + timeout_s
        while not self._try_send(data):
            left = deadline - time.monotonic()
            if left <= 0:
                self._refuse()
            self._socket.poll(_milliseconds(left), zmq.POLLOUT)

    def close(self, flush_s: float = 0.0) -> None:
        """Close this end; with `flush_s`, the context's end waits that long for unsent mail."""
        self._socket.close(linger=_milliseconds(flush_s) if flush_s else 0)
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

    def _encode(self, message: T) -> bytes:
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise HearthError(
                "invalid_value",
                f"a message to {self.endpoints[0]} takes {len(data)} bytes, "
                f"at most {MAX_MESSAGE_BYTES} can be sent",
            )
        return data

    def _try_send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.statistics.sent += 1
        return True

    def _refuse(self) -> None:
        self.statistics.full += 1
        raise MailboxFull(self.endpoints[0])

    async def _wait_for(self, event: int) -> None:
        # The descriptor is edge-triggered: it tells of changes since EVENTS was last read.
        while not int(self._socket.getsockopt(zmq.EVENTS)) & event:
            await anyio.wait_readable(self._socket.FD)


def wait_any(mailboxes: Sequence[Mailbox[Any]], timeout_s: float) -> None:
    """Block the thread until one of these receiving ends has mail, `timeout_s` at most."""
    poller = zmq.Poller()
    for mailbox in mailboxes:
        poller.register(mailbox._socket, zmq.POLLIN)  # noqa: SLF001 - same module
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


def _open(context: ZmqContext, kind: int, limit: int) -> zmq.Socket[bytes]:
    if limit < 1:
        raise HearthError("invalid_value", "a mailbox holds at least 1 message", "limit")
    socket = context.socket(kind)
    socket.set_hwm(limit)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return socket


def _milliseconds(seconds: float) -> int:
    # Rounded up, so that a wait never ends before its deadline and then spins.
    return max(0, int(-(-seconds * 1000 // 1)))
