"""What clients do not read is bounded in bytes, for each of them and for all together."""

from __future__ import annotations

import tracemalloc
from typing import Any, cast

import pytest

from hearth.actors.settings import PolicySettings
from hearth.daemon.door import request_tracker
from hearth.daemon.door.request_tracker import Delivery, RequestTracker
from hearth.daemon.door.sessions import OpenRequest, Outbox, Session
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.state import DoorFacts, DoorState
from hearth_client.protocol import Answer, Delta, Done, Error, TokenLogprob, Tokens, Usage

MIB = 1 << 20
SLOW_BYTES = 60_000
UNREAD_BYTES = 300_000
CLIENTS = 20


class Mute:
    """Actors that take everything, and clients who read nothing."""

    def post(self, message: object) -> None:
        pass

    def full(self, _connection: int) -> bool:
        return False

    def send(self, _connection: int, _data: bytes, *, delimited: bool) -> str:
        assert not delimited
        return "full"

    def session_ended(self, _connection: int) -> None:
        pass


def delta(number: int, logprobs: int = 0) -> Delta:
    top = [(1000 + number + one, -0.25 * one - number) for one in range(logprobs)]
    log = [TokenLogprob(logprob=-0.5 * number, top=top)] if logprobs else []
    return Delta(id="a", seq=0, text="word ", tokens=[1000 + number], logprobs=log)


def done(number: int) -> Answer:
    usage = Usage(prompt_tokens=1000 + number, completion_tokens=999 + number, queue_ms=number / 3)
    return Done(id=str(number), reason="stop", usage=usage)


KINDS: dict[str, Any] = {
    "a delta that grows": delta,
    "with log probabilities": lambda number: delta(number, 5),
    "ends": done,
    "errors": lambda number: Error(id=str(number), code="queue_full", message=f"{number} wait"),
    "ids": lambda number: Tokens(id=str(number), tokens=list(range(number, number + 300))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_is_counted_as_it_lies_in_memory(kind: str) -> None:
    outbox = Outbox()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            answer = KINDS[kind](1000 * number)
            if not (isinstance(answer, Delta) and outbox.merge(answer)):
                outbox.add(answer, 0.0)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 1.5 < outbox.bytes < 2 * held


def test_all_that_nobody_reads_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracker, "log_finished", lambda _: None)
    mute: Any = Mute()
    desk = RequestTracker(
        DoorState(
            DoorFacts(server="x"),
            DoorSettings(
                slow_bytes=SLOW_BYTES, client_memory_mb=1, unread_share=UNREAD_BYTES / MIB
            ),
            PolicySettings(),
        ),
        mute,
        to_tokenizer=mute,
        to_scheduler=mute,
        to_scheduler_control=mute,
    )
    sessions = desk.sessions
    most = most_of_one = 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for turn in range(200):
            for number in range(CLIENTS):
                request = _request(desk, number)
                # One after the other they read less and less.
                for part in range(1 + number % 4):
                    if sessions.find(request.rid) is not None:
                        desk.delivery.send_delta(request, delta(turn + part))
                        desk.stop_if_slow(request.session)
            desk.abandon_lost()
            waiting = [session.outbox.bytes for session in desk.delivery.behind]
            most, most_of_one = max(most, sum(waiting)), max(most_of_one, *waiting)
        held = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert UNREAD_BYTES / 2 < most <= UNREAD_BYTES + 1000
    assert SLOW_BYTES / 4 < most_of_one <= SLOW_BYTES + 1000
    assert held < 2 * UNREAD_BYTES


def _request(desk: RequestTracker, number: int) -> OpenRequest:
    """The open generation of a client, which says hello and asks again when it has lost it."""
    session: Session = desk.sessions.greet(number, "test", 10.0, 0.0)
    request = session.open.get("a")
    return request or desk.sessions.admit(session, "a", "generate", 0.0, None)


def test_the_client_with_the_most_ends_first_and_the_others_go_on() -> None:
    mute: Any = Mute()
    desk = RequestTracker(
        DoorState(
            DoorFacts(server="x"),
            DoorSettings(client_memory_mb=1, unread_share=10_000 / MIB),
            PolicySettings(),
        ),
        mute,
        to_tokenizer=mute,
        to_scheduler=mute,
        to_scheduler_control=cast("Any", mute),
    )
    little, much = _request(desk, 1), _request(desk, 2)
    for request, size in ((little, 1000), (much, 8000), (little, 1000)):
        desk.delivery.send_delta(request, Delta(id="a", seq=0, text="x" * size))
        desk.stop_if_slow(little.session)
    assert desk.sessions.find(much.rid) is None
    assert desk.sessions.find(little.rid) is little


def test_what_waits_is_not_encoded_until_its_client_takes_more() -> None:
    class Slow(Mute):
        takes = False

        def full(self, _connection: int) -> bool:
            return not self.takes

        def send(self, _connection: int, _data: bytes, *, delimited: bool) -> str:
            assert self.takes
            assert not delimited
            return "sent"

    slow: Any = Slow()
    state = DoorState(DoorFacts(server="x"), DoorSettings(), PolicySettings())
    delivery = Delivery(slow, state.settings, state.clock)
    session = Session(2, 1, "test", 10.0, 10.0, Outbox())
    for number in range(3):
        delivery.send(session, done(number))
        delivery.flush(session)
    assert delivery.behind == [session]
    slow.takes = True
    delivery.flush(session)
    assert not delivery.behind
