from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from hearth.actors.mailbox import MailboxFull, Sender
from hearth.actors.messages import AskReport, Cancel, ClientGone, Convert, ExecutorLimits, Failed
from hearth.actors.settings import PolicySettings
from hearth.daemon.door import front_door
from hearth.daemon.door.fair_queue import FairQueue
from hearth.daemon.door.finished import Listener
from hearth.daemon.door.request_tracker import OWN_REPORT, RequestTracker
from hearth.daemon.door.sessions import Kind, OpenRequest, Session
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Sent
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.state import DoorFacts, DoorState, door_facts, within
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth_client import Client
from hearth_client.protocol import Delta, Detokenized, Tokens
from tests.daemon.door.harness import greet, hear, raw_client, running_door, say


class FakeSocket:
    def __init__(self) -> None:
        self.outcome: Sent = "sent"
        self.sent: list[dict[str, Any]] = []
        self.sessions = {1}
        self.closed: list[int] = []

        self.receivers: list[int] = []

    def full(self, _connection: int) -> bool:
        return False

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        assert not delimited
        if self.outcome == "sent":
            self.receivers.append(connection)
            self.sent.append(msgspec.msgpack.decode(data))
        return self.outcome

    def session_began(self, connection: int) -> None:
        self.sessions.add(connection)

    def session_ended(self, connection: int) -> None:
        self.sessions.remove(connection)

    def take_closed(self) -> list[int]:
        closed, self.closed = self.closed, []
        return closed

    def hung_up(self) -> list[int]:
        return []


class FakeMailbox:
    def __init__(self) -> None:
        self.full = False
        self.posted: list[object] = []

    def post(self, message: object) -> None:
        if self.full:
            raise MailboxFull("inproc://test")
        self.posted.append(message)


class Desk:
    def __init__(self, listeners: Sequence[Listener] = (), **settings: Any) -> None:
        self.socket = FakeSocket()
        self.tokenizer, self.scheduler, self.control = FakeMailbox(), FakeMailbox(), FakeMailbox()
        self.state = DoorState(DoorFacts(server="x"), DoorSettings(**settings), PolicySettings())
        self.tracker = RequestTracker(
            self.state,
            cast("DoorSockets", self.socket),
            to_tokenizer=cast("Sender[Any]", self.tokenizer),
            to_scheduler=cast("Sender[Any]", self.scheduler),
            to_scheduler_control=cast("Sender[Any]", self.control),
            listeners=listeners,
        )
        self.session: Session = self.tracker.sessions.greet(1, "test", 10.0, 0.0)

    def request(self, request_id: str = "a", kind: Kind = "generate") -> OpenRequest:
        return self.tracker.sessions.admit(self.session, request_id, kind, 0.0, None)


def test_a_full_mailbox_refuses_the_request() -> None:
    desk = Desk()
    desk.tokenizer.full = desk.scheduler.full = True
    desk.tracker.ask_tokenizer(desk.request("a"), Convert(1))
    desk.tracker.ask_scheduler(desk.request("b"), AskReport(2))
    assert [(answer["id"], answer["code"]) for answer in desk.socket.sent] == [
        ("a", "queue_full"),
        ("b", "queue_full"),
    ]
    assert desk.session.open == {}


def test_cancels_that_find_no_room_are_posted_later() -> None:
    desk = Desk()
    desk.tokenizer.full = desk.control.full = True
    request = desk.request()
    desk.tracker.cancel(request)
    assert desk.socket.sent[0]["reason"] == "cancelled"
    desk.tracker.retry_cancels()
    desk.control.full = False
    desk.tracker.retry_cancels()
    assert desk.control.posted == [Cancel(request.rid)]
    desk.tokenizer.full = False
    for _ in range(2):
        desk.tracker.retry_cancels()
    assert desk.tokenizer.posted == desk.control.posted == [Cancel(request.rid)]


def test_the_first_end_counts_and_the_others_are_silent() -> None:
    desk = Desk()
    request = desk.request()
    desk.tracker.done(request, "stop")
    desk.tracker.fail(request, "internal", "late")
    desk.tracker.reply(request, Tokens(id="a", tokens=[]))
    desk.tracker.cancel(request)
    assert [answer["t"] for answer in desk.socket.sent] == ["done"]
    assert desk.state.totals == {"completed": 1}


def test_a_client_that_is_gone_takes_its_requests_along() -> None:
    desk = Desk()
    first, second = desk.request("a"), desk.request("b")
    desk.socket.outcome = "gone"
    desk.tracker.fail(first, "non_finite", "not a number")
    desk.tracker.abandon_lost()
    assert len(desk.tracker.sessions) == 0
    assert desk.tokenizer.posted == desk.control.posted == [Cancel(second.rid)]
    assert desk.state.totals["failed"] == 2
    assert desk.state.totals["gone"] == 1


def test_the_tokenizer_is_told_of_every_text_that_nobody_waits_for() -> None:
    desk = Desk()
    asked, _ = desk.request("a", "convert"), desk.request("b", "status")
    desk.tracker.abandon(desk.session, "left")
    assert desk.tokenizer.posted == [Cancel(asked.rid)]
    assert desk.control.posted == []


def test_a_client_that_pinned_is_told_of_behind_its_cancels_once_it_is_gone() -> None:
    desk = Desk()
    desk.session.pins = True
    request, number = desk.request(), desk.session.number
    desk.tokenizer.full = True
    desk.tracker.abandon(desk.session, "left")
    desk.tokenizer.full = False
    desk.tracker.retry_cancels()
    assert desk.tokenizer.posted == [Cancel(request.rid), ClientGone(number)]
    assert desk.control.posted == [Cancel(request.rid)]


def test_a_socket_of_one_answer_a_message_gets_no_other_while_it_waits() -> None:
    desk = Desk()
    desk.session.delimited = True
    desk.request()
    desk.tracker.probe_idle_sessions()
    assert desk.socket.sent == []


def test_answers_wait_in_order_until_the_client_reads() -> None:
    desk = Desk()
    first, second = desk.request("a"), desk.request("b")
    desk.socket.outcome = "full"
    desk.tracker.done(first, "stop")
    desk.tracker.fail(second, "internal", "late")
    assert desk.tracker.delivery.behind == [desk.session]
    desk.tracker.delivery.flush(desk.session)
    assert desk.socket.sent == []
    desk.socket.outcome = "sent"
    desk.tracker.delivery.flush(desk.session)
    assert [answer["id"] for answer in desk.socket.sent] == ["a", "b"]
    assert desk.tracker.delivery.behind == []


def test_a_client_that_only_provokes_answers_is_dropped() -> None:
    desk = Desk(requests_per_client=5000)
    desk.socket.outcome = "full"
    for number in range(1100):
        if desk.tracker.sessions.get(1) is not None:
            desk.tracker.done(desk.request(str(number)), "stop")
            desk.tracker.abandon_lost()
    assert len(desk.tracker.sessions) == 0
    assert desk.tracker.delivery.behind == []


def delta(desk: Desk, request: OpenRequest, size: int) -> None:
    text = Delta(id=request.id, seq=0, text="x" * size)
    desk.tracker.delivery.send_delta(request, text)
    desk.tracker.stop_if_slow(desk.session)


def test_all_that_waits_for_a_client_counts_together() -> None:
    desk = Desk(slow_bytes=10_000)
    desk.socket.outcome = "full"
    requests = [desk.request(name) for name in "abc"]
    for request in requests:
        delta(desk, request, 3000)
    assert len(desk.session.open) == 3
    delta(desk, requests[0], 3000)
    assert desk.session.open == {}
    assert desk.tracker.sessions.get(1) is desk.session, "it may still read why"
    desk.socket.outcome = "sent"
    desk.tracker.delivery.flush(desk.session)
    assert [answer["code"] for answer in desk.socket.sent] == ["slow_client"] * 3


def test_a_client_without_open_requests_may_be_slow_too() -> None:
    desk = Desk(slow_bytes=10_000)
    desk.socket.outcome = "full"
    for name in "ab":
        request = desk.request(name)
        desk.tracker.delivery.send_delta(request, Delta(id=name, seq=0, text="x" * 6000))
        desk.tracker.done(request, "stop")
    desk.tracker.stop_if_slow(desk.session)
    assert len(desk.tracker.sessions) == 0


def test_a_client_that_does_not_read_its_long_conversions_is_dropped() -> None:
    desk = Desk()
    desk.socket.outcome = "full"
    text = "x" * (6 << 20)
    for number in range(5):
        if desk.tracker.sessions.get(1) is not None:
            request = desk.request(str(number))
            desk.tracker.reply(request, Detokenized(id=request.id, text=text))
            desk.tracker.abandon_lost()
    assert len(desk.tracker.sessions) == 0
    assert desk.tracker.delivery.behind == []


def test_who_may_not_pin_for_others_takes_the_pins_of_an_idle_session() -> None:
    desk = Desk()
    other = desk.tracker.sessions.greet(2, "other", 10.0, 0.0, peer="uid:2")
    desk.tracker.began(other)
    other.pins, other.pinned = True, 64
    # Its own share is full: nobody else has to do with that.
    desk.tracker.fail(desk.request("a"), "cache_full", "too much", "cache")
    assert desk.tracker.sessions.get(2) is other
    desk.tracker.fail(desk.request("b"), *("cache_full", "too much", "prefix_cache_bytes"))
    assert desk.tracker.sessions.get(2) is None
    assert desk.tokenizer.posted == [ClientGone(other.number)]
    desk.tracker.fail(desk.request("c"), *("cache_full", "too much", "prefix_cache_bytes"))
    assert [answer.get("retry_after_s") for answer in desk.socket.sent] == [None, 0.05, None]


def test_a_session_has_pinned_what_its_requests_kept() -> None:
    desk = Desk()
    for request_id, pins in (("a", True), ("b", True), ("c", False)):
        request = desk.request(request_id)
        request.pins, request.prompt_tokens = pins, 40
        if request_id == "b":
            desk.tracker.fail(request, "cache_full", "too much", "cache")
        else:
            desk.tracker.done(request, "length")
    assert desk.session.pinned == 40


def test_the_scheduler_is_asked_for_its_load_by_nobody_s_request() -> None:
    with running_door() as door:
        loads = [door.portal.start_task_soon(door.door.load) for _ in range(3)]
        for load in loads:
            report = load.result(20)
            assert report is not None
            assert (report.rid, report.places, report.queued) == (OWN_REPORT, 8, 2)
        with Client(door.path) as client:
            assert client.status().queued == 2
            assert door.on_loop(lambda: door.door.clients) == 1


def test_limits_that_were_reloaded_are_those_that_are_told() -> None:
    with running_door(clients=3) as door:
        limits = door.door.state.settings
        assert limits.current.clients == 3
        other = replace(limits.current, clients=5)
        door.on_loop(lambda: door.door.adopt(other, PolicySettings()))
        assert limits.current.clients == 5


def test_a_scheduler_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_door, "_REPORT_S", 0.01)
    with running_door() as door:
        monkeypatch.setattr(door.door._tracker, "ask_load", lambda: True)
        assert door.portal.call(door.door.load) is None


def test_a_scheduler_whose_inbox_is_full_is_not_asked() -> None:
    desk = Desk()
    assert desk.tracker.ask_load()
    desk.scheduler.full = True
    assert not desk.tracker.ask_load()


def test_what_is_refused_at_the_door_is_counted_by_code() -> None:
    with running_door() as door, raw_client(door.path) as client:
        say(client, {"t": "status", "id": "a"})
        assert hear(client)["code"] == "hello_required"
        greet(client)
        say(client, {"t": "generate", "id": "a", "prompt": 5})
        assert hear(client)["code"] == "invalid_value"
        counted = door.on_loop(lambda: dict(door.door.state.refusals))
    assert counted == {"hello_required": 1, "invalid_value": 1}


def test_a_request_is_refused_until_it_is_accepted_and_fails_from_then_on() -> None:
    desk = Desk()
    early, late = desk.request("a"), desk.request("b")
    late.accepted = True
    for request in (early, late):
        desk.tracker.fail(request, "queue_full", "full")
    assert desk.state.refusals == {"queue_full": 1}


def test_a_code_that_is_none_is_a_fault_of_ours() -> None:
    with running_door() as door, raw_client(door.path) as client:
        greet(client)
        say(client, {"t": "generate", "id": "a", "prompt": "hang"})
        assert hear(client)["t"] == "accepted"
        told = Failed([door.actors.prepared[0].rid], "not a code", "it failed")
        door.on_loop(lambda: door.door._answer(told))
        error = hear(client)
        assert (error["id"], error["code"], error["message"]) == ("a", "internal", "it failed")
        assert "not a code" not in door.totals()


def test_what_an_executor_can_hold_is_what_clients_are_told() -> None:
    limits = ExecutorLimits(max_batch=1, max_prompt_tokens=1023, max_total_tokens=1024)
    config = within(simulated_config(capacity=4096, max_batch=8), limits)
    assert config.max_supported_batch_size == 1
    facts = door_facts(PolicySettings(), "model", config, {})
    assert (facts.prompt_tokens, facts.total_tokens) == (1023, 1024)


def test_clients_are_told_the_limits_that_hold() -> None:
    config = simulated_config(capacity=100)
    facts = door_facts(PolicySettings(), "home", config, {"dtype": "float32"})
    assert (facts.prompt_tokens, facts.total_tokens, facts.model) == (99, 100, "home")
    assert door_facts(PolicySettings(queue_tokens=9), "", config, {}).prompt_tokens == 9


Flow = tuple[str, int]


def served(costs: Mapping[Flow, float], seconds: float) -> Counter[Flow]:
    """How many messages of each were taken, where all always have some that cost so much."""
    turns, taken, spent = FairQueue[Flow](), Counter[Flow](), 0.0
    for one in costs:
        turns.add(*one, one)
    while spent < seconds:
        flow = turns.take()
        assert flow is not None
        turns.add(*flow, flow)
        turns.charge(*flow, costs[flow])
        taken[flow] += 1
        spent += costs[flow]
    return taken


@pytest.mark.parametrize(
    ("costs", "shares"),
    [
        # Time is shared, whatever a message costs.
        ({("a", 1): 0.02, ("b", 2): 0.001}, [0.5, 0.5]),
        # A peer gets no more for having more connections.
        (
            {("a", 1): 0.001, ("b", 2): 0.001, ("b", 3): 0.001, ("b", 4): 0.003},
            [1 / 2, *[1 / 6] * 3],
        ),
        ({("a", 1): 0.02, ("a", 2): 0.001}, [0.5, 0.5]),
    ],
)
def test_time_is_shared_by_peers_and_then_by_connections(
    costs: dict[Flow, float], shares: list[float]
) -> None:
    taken = served(costs, 10.0)
    assert [taken[flow] * cost / 10.0 for flow, cost in costs.items()] == pytest.approx(
        shares, abs=0.01
    )


def test_connections_that_come_anew_each_time_do_not_starve_one_that_stays() -> None:
    turns, taken = FairQueue[int](), Counter[bool]()
    turns.add("a", 0, 0)
    for number in range(1, 1001):
        turns.add("a", number, number)
        one = turns.take()
        assert one is not None
        turns.charge("a", one, 0.001)
        if one == 0:
            turns.add("a", 0, 0)
        taken[one == 0] += 1
    # Each that comes makes the wait one turn longer.
    assert taken[True] > 8


def test_messages_of_one_connection_keep_their_order() -> None:
    turns = FairQueue[int]()
    for number in range(5):
        turns.add("a", 1, number)
    assert [turns.take() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert not turns


def test_a_pause_neither_cancels_a_debt_nor_earns_anything() -> None:
    turns = FairQueue[str]()
    turns.add("dear", 1, "dear")
    assert turns.take() == "dear"
    turns.charge("dear", 1, 0.02)
    # It has waited for nothing meanwhile, and still comes behind all that cost less.
    turns.add("dear", 1, "dear")
    taken = []
    for _ in range(30):
        turns.add("cheap", 2, "cheap")
        taken.append(one := turns.take())
        turns.charge(str(one), 1 if one == "dear" else 2, 0.001)
    assert taken.index("dear") == pytest.approx(20, abs=1)
    for _ in range(100):
        turns.add("dear", 1, "dear")
        turns.take()
        turns.charge("dear", 1, 0.02)
    # Nobody is owed the time in which he asked for nothing.
    for _ in range(2):
        turns.add("cheap", 2, "cheap")
        turns.add("dear", 1, "dear")
    taken = []
    while (one := turns.take()) is not None:
        taken.append(one)
        turns.charge(one, 1 if one == "dear" else 2, 0.02)
    assert Counter(taken[:2]) == {"cheap": 1, "dear": 1}


def test_what_is_remembered_has_a_bound() -> None:
    turns = FairQueue[str]()
    for number in range(5000):
        turns.add(f"peer {number % 1000}", number, "x")
        turns.take()
        turns.charge(f"peer {number % 1000}", number, 0.01)
        assert len(turns._connections) <= 300
        assert len(turns._peers._costs) <= 300
    for number in range(5000):
        turns.add("one", number, "x")
        turns.take()
        turns.charge("one", number, 0.01)
    assert len(turns._connections["one"]._costs) <= 300
