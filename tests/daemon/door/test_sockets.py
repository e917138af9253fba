from __future__ import annotations

from typing import cast

from daemon.door.curve_socket import CurveSocket
from daemon.door.socket import DoorSocket, Received, Sent
from daemon.door.sockets import DoorSockets


class FakeSocket:
    """Has so many messages of one client, whose identity is the same on both."""

    def __init__(self, data: bytes, messages: int) -> None:
        self.data = data
        self.messages = messages
        self.sent: list[tuple[bytes, bytes, bool]] = []

    def receive(self) -> Received | None:
        self.messages -= 1
        return Received(b"same", delimited=False, data=self.data, frames=1) if self.left else None

    @property
    def left(self) -> bool:
        return self.messages >= 0

    def send(self, identity: bytes, data: bytes, *, delimited: bool) -> Sent:
        self.sent.append((identity, data, delimited))
        return "sent"


def both(local: FakeSocket, tcp: FakeSocket) -> DoorSockets:
    return DoorSockets(cast("DoorSocket", local), cast("CurveSocket", tcp))


def test_a_flood_on_one_leaves_the_other_each_second_turn_and_none_is_missed() -> None:
    sockets = both(FakeSocket(b"l", 50), FakeSocket(b"t", 3))
    heard = b""
    while (received := sockets.receive()) is not None:
        heard += received.data
    assert heard == b"ltltlt" + b"l" * 47


def test_identities_are_told_apart_and_answers_find_their_way() -> None:
    local, tcp = FakeSocket(b"l", 1), FakeSocket(b"t", 1)
    sockets = both(local, tcp)
    first, second = sockets.receive(), sockets.receive()
    assert first is not None
    assert second is not None
    assert first.identity != second.identity
    sockets.send(second.identity, b"to tcp", delimited=True)
    sockets.send(first.identity, b"to local", delimited=False)
    assert tcp.sent == [(b"same", b"to tcp", True)]
    assert local.sent == [(b"same", b"to local", False)]
