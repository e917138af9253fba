from __future__ import annotations

from typing import cast

from daemon.door.curve_socket import CurveSocket
from daemon.door.local_socket import LocalSocket
from daemon.door.socket import Received, Sent
from daemon.door.sockets import DoorSockets


class FakeSocket:
    """Has so many messages of one client."""

    def __init__(self, data: bytes, messages: int, connection: int = 0) -> None:
        self.connection = connection
        self.data = data
        self.messages = messages
        self.sent: list[tuple[int, bytes, bool]] = []

    def receive(self) -> Received | None:
        self.messages -= 1
        received = Received(self.connection, delimited=False, data=self.data, frames=1)
        return received if self.left else None

    @property
    def left(self) -> bool:
        return self.messages >= 0

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        self.sent.append((connection, data, delimited))
        return "sent"


def both(local: FakeSocket, tcp: FakeSocket) -> DoorSockets:
    return DoorSockets(cast("LocalSocket", local), cast("CurveSocket", tcp))


def test_a_flood_on_one_leaves_the_other_each_second_turn_and_none_is_missed() -> None:
    sockets = both(FakeSocket(b"l", 50), FakeSocket(b"t", 3))
    heard = b""
    while (received := sockets.receive()) is not None:
        heard += received.data
    assert heard == b"ltltlt" + b"l" * 47


def test_answers_find_their_way() -> None:
    local, tcp = FakeSocket(b"l", 1, 6), FakeSocket(b"t", 1, 3)
    sockets = both(local, tcp)
    first, second = sockets.receive(), sockets.receive()
    assert first is not None
    assert second is not None
    sockets.send(second.connection, b"to tcp", delimited=True)
    sockets.send(first.connection, b"to local", delimited=False)
    assert tcp.sent == [(3, b"to tcp", True)]
    assert local.sent == [(6, b"to local", False)]
