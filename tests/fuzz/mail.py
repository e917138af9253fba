"""Mailboxes and the clients' socket without ZeroMQ: bytes in, bytes out, nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import zmq

from hearth.actors.mailbox import Receiver, Sender
from hearth.daemon.door.socket import Received


class _Socket:
    """Of a mailbox: what was put into `arrived` can be received, what was sent lies in `left`."""

    FD = -1

    def __init__(self) -> None:
        self.arrived: deque[bytes] = deque()
        self.left: deque[bytes] = deque()

    def get(self, _option: int) -> int:
        return zmq.POLLIN if self.arrived else 0

    def recv(self, _flags: int) -> bytes:
        return self.arrived.popleft()

    def send(self, data: bytes, _flags: int) -> None:
        self.left.append(data)

    def close(self) -> None:
        pass

    def set_hwm(self, _limit: int) -> None:
        pass

    setsockopt = bind = connect = lambda *_: None


class _Context:
    def socket(self, _kind: int) -> _Socket:
        return _Socket()


CONTEXT: Any = _Context()


class Inbox(Receiver[Any]):
    """What an actor receives; `handled` is set where it asks for more than has been `put`."""

    def __init__(self, kind: Any) -> None:
        super().__init__(CONTEXT, ["inproc://fuzz"], kind, 10)
        self.handled = anyio.Event()
        self._more = anyio.Event()

    def put(self, data: bytes) -> None:
        """Let this arrive."""
        self.handled = anyio.Event()
        socket: Any = self._socket
        socket.arrived.append(data)
        self._more.set()

    async def receive(self) -> Any:
        """As a receiver does, but for what it waits for."""
        while True:
            if (message := self.receive_nowait()) is not None:
                return message
            self._more = anyio.Event()
            self.handled.set()
            await self._more.wait()


class Outbox(Sender[Any]):
    """What an actor sends; it must be of the kind that the other end reads."""

    def __init__(self, kind: Any) -> None:
        super().__init__(CONTEXT, "inproc://fuzz", 10)
        self._decoder = msgspec.msgpack.Decoder(kind)

    def take(self) -> list[Any]:
        """All that was sent since."""
        socket: Any = self._socket
        taken = [self._decoder.decode(data) for data in socket.left]
        socket.left.clear()
        return taken


class FakeSocket:
    """Of the front door: whole messages of frames arrive from a connection, and answers leave."""

    descriptors: tuple[int, ...] = ()
    pending = False
    idle = True

    def __init__(self, pictures: int) -> None:
        self._pictures = pictures
        self.sessions: set[int] = set()
        self.charged: deque[tuple[int, float]] = deque(maxlen=10)
        self._arrived: deque[Received] = deque()
        self._left: list[tuple[int, bytes]] = []

    def put(self, connection: int, frames: Sequence[bytes]) -> None:
        """Let these frames of one message arrive."""
        delimited = len(frames) > 1 and not frames[0]
        data, *more = frames[delimited:]
        views = [memoryview(one) for one in more[: self._pictures]]
        self._arrived.append(Received(connection, delimited, data, 1 + len(more), views))

    def receive(self) -> Received | None:
        return self._arrived.popleft() if self._arrived else None

    def charge(self, received: Received, seconds: float) -> None:
        self.charged.append((received.connection, seconds))

    def full(self, _connection: int) -> bool:
        return False

    def send(self, connection: int, data: bytes, **_: bool) -> str:
        self._left.append((connection, data))
        return "sent"

    def session_began(self, connection: int) -> None:
        self.sessions.add(connection)

    def session_ended(self, connection: int) -> None:
        self.sessions.remove(connection)

    def take_closed(self) -> list[int]:
        return []

    hung_up = take_closed

    def take(self) -> list[tuple[int, bytes]]:
        """What has left since, and to whom."""
        taken, self._left = self._left, []
        return taken

    def close(self) -> None:
        pass
