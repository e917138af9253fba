"""Requests with pictures in turns, refusals with a hint when to come again, and clients that do."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from hearth.actors.arena import Arena
from hearth.actors.mailbox import Sender
from hearth.actors.messages import Request
from hearth.actors.settings import PolicySettings, Reloadable
from hearth.daemon.door.pictures import Pictures
from hearth.daemon.door.request_tracker import RequestTracker
from hearth.daemon.door.requests import ClientMessageHandler
from hearth.daemon.door.retry_after import GRACE_S, LEAST_S, MOST_S, Pace, RetryAfter
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.state import DoorFacts, DoorState
from hearth.daemon.service_state import ServiceState
from hearth_client import (
    Client,
    ExecutorFailed,
    QueueFull,
    ShuttingDown,
    TooManyClients,
    TooManyRequests,
    WeightsInvalid,
)
from tests.daemon.door.harness import running_door, until
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


def test_a_full_queue_refuses_before_anything_is_encoded_and_says_when_to_come() -> None:
    with running_door(queue_requests=3) as door, Client(door.path) as client:
        held = [client.generate("hang") for _ in range(2)]
        with Client(door.path) as other:
            held.append(other.generate("hang"))
            until(lambda: door.on_loop(lambda: door.door.open_requests) == 3)
            for _ in range(2):
                with pytest.raises(QueueFull) as caught:
                    other.generate("count").text()
                assert caught.value.field == "queue_requests"
                assert caught.value.retry_after_s is not None
            held[0].cancel()
            assert held[0].text() == ""
        # A place is free again, and it is not kept: there are too few of them.
        with Client(door.path) as third:
            assert third.generate("count", max_tokens=1).text() == "0 "
    assert len(door.actors.prepared) == 4


def test_several_replies_find_room_together_or_are_refused_at_once() -> None:
    with running_door(queue_requests=4) as door, Client(door.path) as client:
        _held = client.generate("hang", n=2)
        until(lambda: door.on_loop(lambda: door.door.open_requests) == 1)
        with Client(door.path) as other:
            with pytest.raises(QueueFull):
                other.generate("count", n=3).text()
            assert other.generate("count", n=2, max_tokens=1).text() == "0 "
    assert len(door.actors.prepared) == 2


def test_one_client_leaves_room_in_the_queue_for_another() -> None:
    with running_door(queue_requests=4) as door, Client(door.path) as client:
        _open = [client.generate("hang") for _ in range(3)]
        with pytest.raises(TooManyRequests) as caught:
            client.generate("count").text()
        assert caught.value.field == "client_queue_share"
        assert caught.value.retry_after_s is not None
        with Client(door.path) as other:
            assert other.generate("count", max_tokens=1).text() == "0 "


def test_a_client_that_finds_no_place_is_told_when_to_come() -> None:
    with running_door(clients=1) as door, Client(door.path) as client:
        client.status()
        with pytest.raises(TooManyClients) as caught, Client(door.path) as other:
            other.status()
        assert caught.value.retry_after_s is not None


def test_nothing_is_taken_in_while_a_file_is_cut_short_and_who_waits_can_be_ended() -> None:
    with running_door() as door, Client(door.path) as client:
        waits = client.generate("hang")
        until(lambda: door.on_loop(lambda: door.door.open_requests) == 1)
        reason = "weights is cut short"
        door.on_loop(
            lambda: door.door.tell(service_state=ServiceState("ready").held(reason, refuses=True))
        )
        with pytest.raises(WeightsInvalid, match=reason):
            client.generate("count").text()
        assert client.status().reason == reason
        door.on_loop(lambda: door.door.end_all("weights_invalid", reason))
        with pytest.raises(WeightsInvalid, match=reason):
            waits.text()
        door.on_loop(lambda: door.door.tell(service_state=ServiceState("ready")))
        assert client.generate("count", max_tokens=1).text() == "0 "


def test_who_is_refused_while_the_daemon_stops_is_told_when_to_come() -> None:
    with running_door() as door, Client(door.path) as client:
        held = client.generate("hang")
        # A door that has not heard of it yet has nothing to wait for.
        until(lambda: door.on_loop(lambda: door.door.open_requests) == 1)
        stopping = door.portal.start_task_soon(door.door.stop, 60.0)
        while client.status().state != "draining":
            pass
        with pytest.raises(ShuttingDown) as caught:
            client.generate("count").text()
        assert caught.value.retry_after_s is not None
        # What is left of the drain counts too.
        assert caught.value.retry_after_s > 2
        held.cancel()
        stopping.result(10)


def test_a_failed_executor_says_when_the_next_one_should_be_there() -> None:
    with running_door() as door, Client(door.path) as client:
        door.on_loop(lambda: door.door.tell(ServiceState("starting")))
        with pytest.raises(ExecutorFailed) as caught:
            client.generate("fail").text()
    assert caught.value.retry_after_s is not None


def test_other_limits_count_at_once_and_what_is_open_stays() -> None:
    with running_door() as door, Client(door.path) as client:
        held = [client.generate("hang") for _ in range(3)]
        until(lambda: door.on_loop(lambda: door.door.open_requests) == 3)
        narrow = DoorSettings(clients=1, requests_per_client=2)
        door.on_loop(lambda: door.door.adopt(narrow, PolicySettings()))
        with pytest.raises(TooManyRequests, match="2 requests of this client"):
            client.generate("count").text()
        with pytest.raises(TooManyClients, match="serves 1 clients"):
            Client(door.path).status()
        assert door.on_loop(lambda: door.door.open_requests) == 3
        door.on_loop(lambda: door.door.adopt(DoorSettings(), PolicySettings()))
        assert client.generate("count", max_tokens=2).text()
        for one in held:
            one.cancel()


PLACES = 8


def hints_of(queue: int, now: float) -> RetryAfter:
    return RetryAfter(Reloadable(PolicySettings(queue_requests=queue)), now)


class Shop:
    """`PLACES` that serve, `queue` that wait, and clients who heed what they are told, or do not.

    A client asks for one thing at a time: again at once when it was served, and when it is refused
    after the time that it was told (`patient`) or after a moment of its own.
    """

    def __init__(self, queue: int, patient: int, greedy: int, service_s: float) -> None:
        self.hints = hints_of(queue, 0.0)
        self.hints.executor(0.0, ready=True, working=True)
        self.queue, self.patient, self.service_s = queue, patient, service_s
        self.waiting: list[int] = []
        self.chance = random.Random(1)
        # When, which client, whether it comes as told.
        self.arrivals = [(0.001 * client, client, False) for client in range(patient + greedy)]
        self.ends: list[tuple[float, int]] = []
        self.served = 0
        self.told: list[tuple[float, bool]] = []

    def run(self, seconds: float) -> None:
        now = 0.0
        while now < seconds:
            if self.ends and (not self.arrivals or self.ends[0] <= self.arrivals[0]):
                now, client = heapq.heappop(self.ends)
                self._end(now, client)
            else:
                now, client, as_told = heapq.heappop(self.arrivals)
                self._ask(now, client, as_told=as_told)

    def _ask(self, now: float, client: int, *, as_told: bool) -> None:
        taken = self.hints.admits(client, self.queue - len(self.waiting), now)
        if as_told:
            self.told.append((now, taken))
        if taken:
            self.waiting.append(client)
            self._serve(now)
            return
        told = self.hints.after("queue_full", client, now)
        assert told is not None
        assert LEAST_S <= told <= MOST_S
        heeds = client < self.patient
        after = told + 0.02 * self.chance.random() if heeds else 0.03
        heapq.heappush(self.arrivals, (now + after, client, heeds))

    def _end(self, now: float, client: int) -> None:
        self.served += 1
        self.hints.ended(now)
        heapq.heappush(self.arrivals, (now + 0.001, client, False))
        self._serve(now)

    def _serve(self, now: float) -> None:
        if self.waiting and len(self.ends) < PLACES:
            until = now + self.service_s * (0.5 + self.chance.random())
            heapq.heappush(self.ends, (until, self.waiting.pop(0)))


@pytest.mark.parametrize(
    ("queue", "patient", "greedy", "least"),
    [(16, 100, 0, 0.9), (64, 300, 0, 0.9), (16, 20, 20, 0.75), (256, 400, 64, 0.5)],
)
def test_who_comes_again_when_told_to_is_mostly_taken(
    queue: int, patient: int, greedy: int, least: float
) -> None:
    shop = Shop(queue, patient, greedy, service_s=0.16)
    shop.run(25.0)
    # The first moments have no pace to go by.
    settled = [taken for when, taken in shop.told if when > 5.0]
    assert len(settled) > 200
    assert sum(settled) / len(settled) > least
    # Nothing stands still for those who are waited for.
    assert shop.served > 0.97 * 25 * PLACES / 0.16


def test_where_nobody_who_was_told_comes_all_places_are_used() -> None:
    hints = hints_of(16, 0.0)
    hints.executor(0.0, ready=True, working=True)
    for client in range(100):
        hints.after("queue_full", client, 0.0)
    free = 16
    # Only a fourth of the queue is kept, and that for a moment.
    taken = sum(hints.admits(1000, free - one, 1.0) for one in range(free))
    assert taken >= 12
    assert hints.admits(1000, 1, MOST_S + 2 * GRACE_S)


def test_a_pace_counts_the_time_of_work_alone() -> None:
    pace = Pace()
    pace.works(10.0, working=True)
    assert pace.seconds(10.05) == 0.1
    assert pace.seconds(13.0) == 3.0
    pace.ended(11.0)
    pace.ended(12.0)
    pace.works(12.0, working=False)
    assert pace.seconds(500.0) == 1.0
    pace.works(500.0, working=True)
    for one in range(200):
        pace.ended(500.0 + 0.1 * one)
    assert pace.seconds(519.9) == pytest.approx(0.1)


def test_each_is_told_a_time_of_its_own() -> None:
    hints = hints_of(256, 0.0)
    hints.executor(0.0, ready=True, working=True)
    for tenth in range(100):
        hints.ended(tenth / 10)
    now = 10.0
    told = [hints.after("queue_full", client, now) for client in range(5)]
    times = [0.0 if one is None else one for one in told]
    gaps = [later - one for one, later in itertools.pairwise(times)]
    assert gaps == [pytest.approx(0.11, rel=0.05)] * 4
    # One with a long prompt for which ten have to go.
    behind = hints.after("queue_full", 9, now, ahead=10)
    assert behind == pytest.approx(1.0, rel=0.05)


def test_who_asks_without_rest_is_told_no_more_times_than_a_few() -> None:
    hints = hints_of(256, 0.0)
    hints.executor(0.0, ready=True, working=True)
    told = [hints.after("queue_full", 1, 0.0005 * one) for one in range(50)]
    assert max(one or 0.0 for one in told) <= 4 * 0.11 + 0.1
    other = hints.after("queue_full", 2, 0.025)
    assert other == pytest.approx(0.5, abs=0.1)


def test_while_no_executor_works_it_is_as_long_as_the_last_one_took_to_load() -> None:
    hints = hints_of(16, 100.0)
    hints.executor(120.0, ready=True, working=False)
    assert hints.after("executor_failed", 1, 125.0) == LEAST_S
    assert hints.after("encoder_failed", 1, 125.0) == 20.0
    hints.executor(130.0, ready=False, working=True)
    assert hints.after("executor_failed", 1, 130.0) == 20.0
    assert hints.after("executor_failed", 1, 145.0) == 5.0
    assert hints.after("queue_full", 1, 145.0) == 5.1
    # It is late: as long again.
    assert hints.after("executor_failed", 1, 160.0) == 10.0
    hints.executor(161.0, ready=True, working=True)
    hints.stops(171.0)
    assert hints.after("shutting_down", 1, 165.0) == 6.0 + 31.0


def test_a_client_with_too_much_open_waits_for_its_own() -> None:
    hints = hints_of(256, 0.0)
    hints.executor(0.0, ready=True, working=True)
    for tenth in range(100):
        hints.ended(tenth / 10)
    # A fourth of what is open is its own, so one of four ends is.
    told = [hints.after("too_many_requests", 1, 9.9, own=64, open_now=256) for _ in range(3)]
    assert told == [pytest.approx(0.4 * times, rel=0.05) for times in (1, 2, 3)]
    hints.client_left(1, 9.9)
    told = [hints.after("too_many_requests", 1, 9.9, own=64, open_now=256)]
    assert told == [pytest.approx(0.4, rel=0.05)]


def test_places_of_clients_free_as_they_have_before() -> None:
    hints = hints_of(256, 0.0)
    assert hints.after("too_many_clients", 0, 20.0) == 20.0
    hints.client_left(1, 20.0)
    hints.client_left(2, 24.0)
    assert hints.after("too_many_clients", 0, 24.0) == 12.0


def test_where_waiting_is_vain_nothing_is_told() -> None:
    hints = hints_of(256, 0.0)
    assert hints.after("prompt_too_long", 1, 1.0) is None
    assert hints.after("slow_client", 1, 1.0) is None
