from __future__ import annotations

from typing import cast

import pytest

from hearth.daemon.door.curve_socket import CurveSocket
from hearth.daemon.door.local_socket import LocalSocket
from hearth.daemon.door.socket import Received, Sent
from hearth.daemon.door.sockets import DoorSockets


class FakeSocket:
    """Has so many messages of one client."""

    def __init__(self, data: bytes, messages: int, connection: int = 0) -> None:
        self.connection = connection
        self.data = data
        self.messages = messages
        self.sent: list[tuple[int, bytes, bool]] = []

    def receive(self) -> Received | None:
        if not self.messages:
            return None
        self.messages -= 1
        return Received(self.connection, delimited=False, data=self.data, frames=1)

    def charge(self, received: Received, seconds: float) -> None:
        assert (received.connection, seconds > 0) == (self.connection, True)

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        self.sent.append((connection, data, delimited))
        return "sent"


def both(local: FakeSocket, tcp: FakeSocket) -> DoorSockets:
    return DoorSockets(cast("LocalSocket", local), cast("CurveSocket", tcp))


@pytest.mark.parametrize(
    ("costs", "order"),
    [
        ({"l": 1, "t": 1}, "ltltltllll"),
        ({"l": 4, "t": 1}, "lttttltttt"),
        ({"l": 1, "t": 2}, "ltlltlltll"),
    ],
)
def test_both_share_the_time_and_none_is_missed(costs: dict[str, int], order: str) -> None:
    messages = {one: order.count(one) for one in "lt"}
    sockets = both(FakeSocket(b"l", messages["l"], 2), FakeSocket(b"t", messages["t"], 3))
    heard = ""
    while (received := sockets.receive()) is not None:
        heard += received.data.decode()
        sockets.charge(received, costs[heard[-1]])
    assert heard == order


def test_one_that_was_silent_is_owed_nothing() -> None:
    local, tcp = FakeSocket(b"l", 100, 2), FakeSocket(b"t", 0, 3)
    sockets, heard = both(local, tcp), ""
    for turn in range(30):
        if turn == 20:
            tcp.messages = 100
        received = sockets.receive()
        assert received is not None
        heard += received.data.decode()
        sockets.charge(received, 1.0)
    assert heard[20:].count("t") == pytest.approx(5, abs=1)


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
