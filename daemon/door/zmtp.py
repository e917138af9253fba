"""ZMTP 3, the wire protocol of ZeroMQ, as a ROUTER without keys speaks it: bytes in, events out."""

# https://rfc.zeromq.org/spec/37/

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + _MECHANISM + bytes(32)
"""Greeting, to be sent as soon as a peer has connected: libzmq sends 10 bytes and waits."""
DELIMITER = b"\x01\x00"
"""An empty frame with another behind it."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_BYTES = 255
_PEERS = (b"DEALER", b"REQ")
_MAJOR = 3
_SIGNED_AT, _MAJOR_AT = 9, 10
"""The bytes of a greeting that show older versions; those before have no meaning."""
_COMMAND_BYTES = 4096
_WAIT_BYTES, _CONTEXT_BYTES = 2, 16
"""Sizes of a PING's time-to-live and of its context, which the PONG returns."""
_UNKNOWN_COMMANDS = 64
"""Commands that mean nothing here are dropped, so many of one peer."""
_FRAMES = 1024
"""Frames of one message, beside those that are kept."""
_WHOLE_BYTES = 8192
"""A frame above that, which has not come whole, gets memory of its own."""


class Limits(NamedTuple):
    """Bytes of a frame and of a whole message at most, and how many of its frames are kept."""

    frame_bytes: int
    message_bytes: int
    frames: int


class Reply(NamedTuple):
    """Bytes that are to be sent to the peer."""

    data: bytes


class Ready(NamedTuple):
    """The end of the handshake."""


class Message(NamedTuple):
    """A whole message: as many of its frames as are kept, and how many there were."""

    frames: list[bytes | memoryview]
    total: int


class Refusal(NamedTuple):
    """A peer that is to be disconnected without an error; nothing follows.

    libzmq would take an ERROR for the end of all attempts, and connects again after a plain close.
    """

    reason: str


Event = Reply | Ready | Message | Refusal


class _ViolationError(Exception):
    """A peer that does not keep to the protocol, or to the limits."""


class Zmtp:
    """One connection's side. Take all events before more bytes are given.

    A large frame is received in place: where `room` is not None it is to be filled, and `filled`
    called. How bytes are split does not matter, nor which of the two ways they come.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._step: Callable[[Zmtp], Event | None] = Zmtp._greeting
        self._data = b""
        self._at = 0
        self._flags = 0
        self._body: memoryview | None = None
        self._missing = 0
        self._frames: list[bytes | memoryview] = []
        self._count = 0
        self._bytes = 0
        self._unknown = 0

    @property
    def pending(self) -> bool:
        """True if received bytes have not become events yet."""
        return self._at < len(self._data)

    @property
    def held(self) -> int:
        """Bytes of a message that is not whole."""
        body = 0 if self._body is None else len(self._body) - self._missing
        return self._bytes + body + len(self._data) - self._at

    def room(self) -> memoryview | None:
        """Buffer for the rest of a large frame; None where bytes go to `receive_data`."""
        if self._body is None or not self._missing:
            return None
        return self._body[-self._missing :]

    def filled(self, size: int) -> None:
        """Note that so many bytes of the buffer of `room` were filled."""
        self._missing -= size

    def receive_data(self, data: bytes) -> None:
        """Take bytes in; those of a peer that was refused are dropped."""
        if self._step is Zmtp._nothing:
            return
        room = self.room()
        if room is not None:
            part = data[: len(room)]
            room[: len(part)] = part
            self.filled(len(part))
            data = data[len(part) :]
        self._data = self._data[self._at :] + data if self.pending else data
        self._at = 0

    def next_event(self) -> Event | None:
        """The next event, None where more bytes are needed."""
        try:
            return self._step(self)
        except (_ViolationError, MemoryError, OSError) as error:
            self._step = Zmtp._nothing
            self._data, self._body, self._frames, self._bytes = b"", None, [], 0
            return Refusal(str(error))

    def _nothing(self) -> None:
        """The only step of a connection that was refused."""

    def _greeting(self) -> Event | None:
        data = self._data
        if data[:1] not in {b"", b"\xff"}:
            raise _ViolationError("it does not speak ZMTP, or version 1")
        if len(data) > _SIGNED_AT and not data[_SIGNED_AT] & 1:
            raise _ViolationError("it speaks ZMTP 1")
        if len(data) > _MAJOR_AT and data[_MAJOR_AT] < _MAJOR:
            raise _ViolationError("it speaks ZMTP 2")
        if len(data) < len(GREETING):
            return None
        if data[12:32] != _MECHANISM:
            raise _ViolationError("its mechanism is not NULL")
        self._at = len(GREETING)
        self._step = Zmtp._handshake
        properties = _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")
        return Reply(_command(b"READY", properties))

    def _handshake(self) -> Event | None:
        frame = self._frame()
        if frame is None:
            return None
        _, body = frame
        name, rest = _parts(bytes(body))
        if name != b"READY":
            raise _ViolationError("another command came before READY")
        if _properties(rest).get(b"socket-type") not in _PEERS:
            raise _ViolationError("it is neither a DEALER nor a REQ")
        self._step = Zmtp._traffic
        return Ready()

    def _traffic(self) -> Event | None:
        while (frame := self._frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                reply = self._heed(bytes(body))
                if reply is not None:
                    return reply
                continue
            self._count += 1
            if self._count <= self._limits.frames:
                self._frames.append(body)
            elif self._count > self._limits.frames + _FRAMES:
                raise _ViolationError("a message has too many frames")
            self._bytes += len(body)
            if not flags & _MORE:
                message = Message(self._frames, self._count)
                self._frames, self._count, self._bytes = [], 0, 0
                return message
        return None

    def _heed(self, command: bytes) -> Reply | None:
        name, rest = _parts(command)
        if name == b"PING":
            if not _WAIT_BYTES <= len(rest) <= _WAIT_BYTES + _CONTEXT_BYTES:
                raise _ViolationError("a PING of a wrong size")
            return Reply(_command(b"PONG", rest[_WAIT_BYTES:]))
        if name == b"ERROR":
            raise _ViolationError("it told of an error")
        self._unknown += 1
        if self._unknown > _UNKNOWN_COMMANDS:
            raise _ViolationError("too many commands that mean nothing here")
        return None

    def _frame(self) -> tuple[int, bytes | memoryview] | None:
        """Flags and body of the next frame, None until it is whole."""
        if self._body is not None:
            if self._missing:
                return None
            body, self._body = self._body, None
            return self._flags, body
        data, at = self._data, self._at
        left = len(data) - at
        if not left:
            return None
        flags = data[at]
        if flags & ~(_MORE | _LONG | _COMMAND) or flags & (_MORE | _COMMAND) == _MORE | _COMMAND:
            raise _ViolationError("a frame has flags that mean nothing")
        head = 9 if flags & _LONG else 2
        if left < head:
            return None
        size = int.from_bytes(data[at + 1 : at + head], "big")
        self._check(flags, size)
        start = at + head
        if left >= head + size:
            self._at = start + size
            return flags, data[start : self._at]
        if size > _WHOLE_BYTES:
            self._flags, self._body = flags, _memory(size)
            self._body[: left - head] = memoryview(data)[start:]
            self._missing = size - (left - head)
            self._data, self._at = b"", 0
        return None

    def _check(self, flags: int, size: int) -> None:
        """Raise before a frame takes memory."""
        if flags & _COMMAND:
            if size > _COMMAND_BYTES:
                raise _ViolationError("a command is too large")
        elif self._step is Zmtp._handshake:
            raise _ViolationError("a message came before READY")
        elif size > self._limits.frame_bytes:
            raise _ViolationError("a frame is too large")
        elif self._bytes + size > self._limits.message_bytes:
            raise _ViolationError("a message is too large")


def header(size: int) -> bytes:
    """The bytes before a message of one frame of `size` bytes."""
    return bytes((0, size)) if size <= _SHORT_BYTES else bytes((_LONG,)) + size.to_bytes(8, "big")


def _memory(size: int) -> memoryview:
    # Neither filled with zeros nor taken from the system before bytes arrive, and used again.
    return np.empty(size, np.uint8).data


def _command(name: bytes, rest: bytes) -> bytes:
    body = bytes((len(name),)) + name + rest
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _parts(command: bytes) -> tuple[bytes, bytes]:
    """A command's name and what follows."""
    size = command[0] if command else 0
    if not size or len(command) < 1 + size:
        raise _ViolationError("a command without a name")
    return command[1 : 1 + size], command[1 + size :]


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Values by names in lower case: these have no case."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_ends = at + 1 + data[at]
        value_begins = name_ends + 4
        value_ends = value_begins + int.from_bytes(data[name_ends:value_begins], "big")
        if name_ends == at + 1 or value_ends > len(data):
            raise _ViolationError("its properties cannot be read")
        found[data[at + 1 : name_ends].lower()] = data[value_begins:value_ends]
        at = value_ends
    return found
