"""How the loop divides its time, without a running loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors import messages as m
from daemon.door import front_door
from daemon.door.front_door import FrontDoor
from daemon.door.settings import DoorFacts, DoorSettings
from daemon.door.socket import DoorSocket, Received
from daemon.life import Life
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

    def send(self, connection: int, count: int = 1, data: bytes = b"x") -> None:
        for _ in range(count):
            self.socket.put(connection, [data])

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


def test_who_costs_much_comes_behind_who_costs_little(loop: Loop) -> None:
    loop.send(DEAR, 30)
    loop.send(CHEAP, 30)
    while len(loop.handled) < 32:
        loop.turns(1)
    assert Counter(loop.handled[:32]) == {DEAR: 2, CHEAP: 30}


def test_what_is_held_has_a_bound(loop: Loop) -> None:
    large: dict[str, Any] = {"data": b"x" * (1 << 20)}
    loop.send(DEAR, 100, **large)
    loop.turns(1)
    assert loop.door._held_bytes <= front_door._HELD_BYTES
    loop.turns(800)
    assert len(loop.handled) == 100
    assert (loop.door._held, loop.door._held_bytes) == (0, 0)
    loop.send(CHEAP, 100)
    loop.turns(1)
    assert loop.door._held < front_door._HELD


def test_the_loop_sleeps_where_nothing_can_be_due(loop: Loop) -> None:
    door = loop.door
    door.tell(Life("ready"))
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
    door.tell(Life("ready").draining("asked to"))
    assert door._idle_s == 0.0
