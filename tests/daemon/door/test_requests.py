"""Pictures of one request are taken one by one, so that others have their turn in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from hearth.actors.arena import Arena
from hearth.actors.mailbox import Sender
from hearth.actors.messages import Request
from hearth.actors.settings import PolicySettings
from hearth.daemon.door.pictures import Pictures
from hearth.daemon.door.request_tracker import RequestTracker
from hearth.daemon.door.requests import ClientMessageHandler
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.state import DoorFacts, DoorState
from hearth.daemon.service_state import ServiceState
from tests.daemon.door.test_request_tracker import Desk, FakeMailbox, FakeSocket

SETTINGS = DoorSettings(images_per_request=4, image_bytes=1000)


class Counter:
    """Requests before an arena of 4 KiB, without a loop."""

    def __init__(self, arena: Arena) -> None:
        self.pictures = Pictures(arena)
        self.socket = FakeSocket()
        self.tokenizer = FakeMailbox()
        state = DoorState(
            DoorFacts(server="x", places=8), SETTINGS, PolicySettings(), self.pictures
        )
        state.service_state = ServiceState("ready")
        self.tracker = RequestTracker(
            state,
            cast("DoorSockets", self.socket),
            to_tokenizer=cast("Sender[Any]", self.tokenizer),
            to_scheduler=cast("Sender[Any]", FakeMailbox()),
            to_scheduler_control=cast("Sender[Any]", FakeMailbox()),
        )
        self.requests = ClientMessageHandler(state, self.tracker)
        self.tracker.sessions.greet(1, "test", 10.0, state.clock.now())

    def say(self, message: dict[str, Any], *frames: bytes) -> None:
        data = msgspec.msgpack.encode(message)
        views = [memoryview(frame) for frame in frames]
        self.requests.handle(Received(1, False, data, 1 + len(views), views))

    def ask(self, request_id: str, *frames: bytes) -> None:
        parts = [
            {"type": "image", "frame": n, "encoding": "mono8", "width": 10, "height": 10}
            for n in range(1, len(frames) + 1)
        ]
        parts.append({"type": "text", "text": request_id})
        turns = [{"role": "user", "content": parts}]
        self.say({"t": "generate", "id": request_id, "messages": turns}, *frames)

    def asked(self) -> list[int]:
        """How many images each request has of which the tokenizer knows."""
        return [len(one.visuals) for one in self.tokenizer.posted if isinstance(one, Request)]


@pytest.fixture
def counter() -> Iterator[Counter]:
    arena = Arena.create("test", 4096)
    yield Counter(arena)
    arena.close()


def test_each_turn_of_the_loop_takes_one_picture_and_requests_take_turns(counter: Counter) -> None:
    counter.ask("many", *[bytes(100)] * 4)
    counter.ask("one", bytes(100))
    counter.ask("none")
    assert counter.asked() == [0]
    seen = []
    while counter.requests.fill_one():
        seen.append(counter.asked())
    assert seen == [[0], [0, 1], [0, 1], [0, 1], [0, 1, 4]]
    assert counter.socket.sent == []


def test_pictures_of_a_request_that_has_ended_are_not_copied_any_more(counter: Counter) -> None:
    counter.ask("many", *[b"a" * 100] * 4)
    assert counter.requests.fill_one()
    counter.say({"t": "cancel", "id": "many"})
    assert counter.pictures.bytes == 0
    counter.ask("other", *[b"b" * 100] * 4)
    while counter.requests.fill_one():
        pass
    assert counter.asked() == [4]
    assert [one["reason"] for one in counter.socket.sent] == ["cancelled"]


def test_a_fault_in_a_later_picture_ends_the_request_and_frees_all(counter: Counter) -> None:
    counter.ask("many", bytes(100), bytes(99), bytes(100))
    while counter.requests.fill_one():
        pass
    (error,) = counter.socket.sent
    assert (error["id"], error["code"]) == ("many", "image_invalid")
    assert error["field"] == "messages[0].content[1]"
    assert counter.pictures.bytes == 0
    assert counter.asked() == []


def test_no_room_is_told_at_once_with_a_time_to_come_again(counter: Counter) -> None:
    frame = bytes(100)
    for name in "abcdefg":
        counter.ask(name, *[frame] * 4)
    (refused,) = {one["code"] for one in counter.socket.sent}
    assert refused in {"queue_full", "too_many_requests"}
    assert all(one["retry_after_s"] > 0 for one in counter.socket.sent)
    assert counter.tracker.sessions.generations + len(counter.socket.sent) == 7


def test_a_user_without_a_place_gets_one_of_who_has_them_all() -> None:
    desk = Desk(clients=2)
    state = desk.state
    state.service_state = ServiceState("ready")
    requests = ClientMessageHandler(state, desk.tracker)
    desk.tracker.abandon(desk.session, "left")

    def say(connection: int, peer: str, **message: Any) -> list[Any]:
        before = len(desk.socket.sent)
        data = msgspec.msgpack.encode(message)
        requests.handle(Received(connection, False, data, 1, (), peer))
        said = zip(desk.socket.receivers[before:], desk.socket.sent[before:], strict=True)
        return [(to, one["t"], one.get("code")) for to, one in said]

    hello: dict[str, Any] = {"t": "hello", "proto": [1]}
    for connection in (1, 2):
        say(connection, "uid:1", **hello)
    assert say(3, "uid:1", **hello)[-1] == (3, "error", "too_many_clients")
    assert say(4, "uid:2", **hello)[-1] == (4, "welcome", None)
    assert say(1, "uid:1", t="status", id="a") == [(1, "error", "hello_required")]
    assert say(1, "uid:1", **hello)[-1] == (1, "error", "too_many_clients")
    assert say(5, "uid:3", t="hello", proto=[1], status_only=True)[-1] == (5, "welcome", None)
