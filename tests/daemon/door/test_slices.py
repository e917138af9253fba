"""How the loop divides its time, without a running loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hearth.actors import messages as m
from hearth.actors.settings import PolicySettings
from hearth.daemon.door import front_door
from hearth.daemon.door.front_door import FrontDoor
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import DoorSocket, Received
from hearth.daemon.door.state import DoorFacts
from hearth.daemon.service_state import ServiceState
from tests.fuzz.mail import FakeSocket, Inbox, Outbox

DEAR, CHEAP = 2, 4
COSTS = {DEAR: 0.0139, CHEAP: 0.0001}


class Loop:
    """A door whose clock moves by what messages cost, as their connection says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.handled: list[int] = []
        self.socket = FakeSocket(0)
        self.door = FrontDoor(
            DoorSettings(socket=str(folder / "d.sock")),
            PolicySettings(),
            inbox=Inbox(m.DoorMessage),
            to_tokenizer=Outbox(m.TokenizerMessage),
            to_scheduler=Outbox(m.SchedulerMessage),
            to_scheduler_control=Outbox(m.SchedulerControl),
            facts=DoorFacts(server="hearth test"),
            environ={},
        )
        self.door._socket.close()
        self.door._socket._all = [cast("DoorSocket", self.socket)]
        clock = SimpleNamespace(thread_time=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(front_door, "time", clock)
        monkeypatch.setattr(self.door._requests, "handle", self._handle)

    def send(self, connection: int, count: int = 1) -> None:
        for _ in range(count):
            self.socket.put(connection, [b"x"])

    def turns(self, count: int) -> list[int]:
        """What each of so many turns handles."""
        counts = []
        for _ in range(count):
            before = len(self.handled)
            self.door._take_requests()
            counts.append(len(self.handled) - before)
        return counts

    def _handle(self, received: Received) -> None:
        self.handled.append(received.connection)
        self.now += COSTS[received.connection]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(tmp_path, monkeypatch)
    with closing(made.door):
        yield made


def test_a_turn_takes_as_many_messages_as_fit_into_its_time(loop: Loop) -> None:
    loop.send(CHEAP, 50)
    assert loop.turns(4) == pytest.approx([20, 20, 10, 0], abs=1)
    assert len(loop.handled) == 50


def test_what_a_message_took_too_long_is_owed_to_the_turns_behind_it(loop: Loop) -> None:
    loop.send(DEAR, 2)
    assert loop.turns(7) == [1, *[0] * 5, 1]


def test_what_a_message_took_is_charged_to_its_connection(loop: Loop) -> None:
    loop.send(DEAR)
    loop.send(CHEAP)
    loop.turns(8)
    assert list(loop.socket.charged) == [(DEAR, COSTS[DEAR]), (CHEAP, pytest.approx(COSTS[CHEAP]))]


def test_the_loop_sleeps_where_nothing_can_be_due(loop: Loop) -> None:
    door = loop.door
    door.tell(ServiceState("ready"))
    assert door._idle_s == front_door._IDLE_S
    session = door.sessions.greet(DEAR, "test", 10.0, 0.0)
    # What a pause counts of a lease is more than that.
    assert door._idle_s == front_door._LEASES_S < door.state.clock.most_s
    request = door.sessions.admit(session, "a", "generate", 0.0, 5.0)
    assert door._idle_s == 0.0
    door.sessions.close(request)
    loop.socket.idle = False
    assert door._idle_s == 0.0
    loop.socket.idle = True
    door.tell(ServiceState("ready").draining("asked to"))
    assert door._idle_s == 0.0
