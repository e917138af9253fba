from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from hearth.actors.mailbox import MailboxFull, Sender
from hearth.actors.messages import AskReport, Cancel, ClientGone, Convert
from hearth.actors.settings import PolicySettings
from hearth.daemon.door.finished import Listener
from hearth.daemon.door.request_tracker import RequestTracker
from hearth.daemon.door.sessions import Kind, OpenRequest, Session
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Sent
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.state import DoorFacts, DoorState
from hearth_client.protocol import Delta, Detokenized, Tokens


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
