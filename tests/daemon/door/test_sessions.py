from __future__ import annotations

import tracemalloc
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.actors.settings import PolicySettings, Reloadable
from hearth.daemon.door import request_tracker
from hearth.daemon.door.request_tracker import Delivery, RequestTracker
from hearth.daemon.door.sessions import OpenRequest, Outbox, Session, Sessions
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.state import _MOST_S, DoorFacts, DoorState
from hearth.runtime.errors import HearthError
from hearth_client.protocol import (
    Accepted,
    Answer,
    Delta,
    Detokenized,
    Done,
    Error,
    Leased,
    TokenLogprob,
    Tokens,
    Usage,
)
from hearth_client.running_clock import RunningClock


def make(clients: int = 3, requests: int = 4) -> Sessions:
    return Sessions(Reloadable(DoorSettings(clients=clients, requests_per_client=requests)))


def test_a_lease_runs_out_unless_renewed() -> None:
    sessions = make()
    one = sessions.greet(1, "one", 10.0, now=0.0)
    two = sessions.greet(2, "two", 10.0, now=0.0)
    sessions.renew(two, 5.0)
    assert sessions.expired(9.9) == []
    assert sessions.expired(10.0) == [one]
    assert sessions.expired(15.0) == [one, two]


def test_a_lease_does_not_run_while_the_machine_sleeps() -> None:
    now = 0.0
    clock = RunningClock(_MOST_S, lambda: now)
    sessions = make()
    one = sessions.greet(1, "one", 10.0, clock.now())
    now += 24 * 3600
    assert sessions.expired(clock.now()) == []
    for _ in range(40):
        now += 0.25
        expired = sessions.expired(clock.now())
    assert expired == [one]


def test_a_second_hello_keeps_requests_and_changes_the_lease() -> None:
    sessions = make(clients=1)
    session = sessions.greet(1, "one", 10.0, now=0.0)
    request = sessions.admit(session, "a", "generate", 1.0, None)
    assert sessions.greet(1, "again", 20.0, now=2.0) is session
    assert (session.client, session.expires, session.open) == ("again", 22.0, {"a": request})


def test_clients_are_limited() -> None:
    sessions = make(clients=2)
    first = sessions.greet(1, "", 1.0, 0.0)
    sessions.greet(2, "", 1.0, 0.0)
    with pytest.raises(HearthError, match="too_many_clients"):
        sessions.greet(3, "", 1.0, 0.0)
    sessions.drop(first)
    sessions.greet(3, "", 1.0, 0.0)
    assert len(sessions) == 2


def greeted(sessions: Sessions, *peers: str) -> list[Session]:
    return [
        sessions.greet(number, peer, 10.0, float(number), peer=peer)
        for number, peer in enumerate(peers)
    ]


def test_a_user_with_fewer_places_takes_an_idle_one_of_who_has_most() -> None:
    sessions = make(clients=5)
    given = greeted(sessions, "a", "a", "a", "a", "b")
    sessions.admit(given[0], "x", "generate", 1.0, None)
    assert sessions.giving_way("b") is given[1]
    assert sessions.giving_way("a") is None
    sessions.renew(given[1], 7.0)
    assert sessions.giving_way("c") is given[2]
    given[2].outbox.add(Leased(seconds=1.0), 8.0)
    assert sessions.giving_way("c") is given[3]


@pytest.mark.parametrize(
    ("peers", "gives"),
    [("aab", False), ("aaab", True), ("aabb", False), ("a", False), ("aa", True)],
)
def test_nobody_takes_a_place_that_would_be_taken_back(peers: str, *, gives: bool) -> None:
    sessions = make(clients=len(peers))
    greeted(sessions, *peers)
    assert (sessions.giving_way("b") is not None) == gives


def test_where_who_has_most_is_at_work_the_next_one_gives_way() -> None:
    sessions = make(clients=5)
    given = greeted(sessions, "a", "a", "a", "b", "b")
    for one in given[:3]:
        sessions.admit(one, "x", "generate", 1.0, None)
    assert sessions.giving_way("c") is given[3]


def test_pins_are_taken_from_who_has_pinned_most() -> None:
    sessions = make(clients=5)
    given = greeted(sessions, "a", "a", "b")
    assert sessions.giving_way("b", pins=True) is None
    given[1].pinned, given[2].pinned = 64, 32
    assert sessions.giving_way("b", pins=True) is given[1]
    given[2].pinned = 64
    assert sessions.giving_way("b", pins=True) is None
    assert sessions.giving_way("c", pins=True) in {given[1], given[2]}


def test_ids_are_per_session_and_free_after_the_end() -> None:
    sessions = make()
    one = sessions.greet(1, "", 1.0, 0.0)
    two = sessions.greet(2, "", 1.0, 0.0)
    first = sessions.admit(one, "a", "generate", 0.0, None)
    other = sessions.admit(two, "a", "generate", 0.0, None)
    assert first.rid < other.rid
    with pytest.raises(HearthError) as caught:
        sessions.admit(one, "a", "status", 0.0, None)
    assert (caught.value.code, caught.value.field) == ("duplicate_id", "id")
    assert sessions.close(first)
    assert not sessions.close(first), "only one caller owes the terminal answer"
    assert sessions.find(first.rid) is None
    assert sessions.admit(one, "a", "generate", 0.0, None).rid > other.rid


def test_requests_per_client_are_limited() -> None:
    sessions = make(requests=2)
    session = sessions.greet(1, "", 1.0, 0.0)
    for request_id in "ab":
        sessions.admit(session, request_id, "generate", 0.0, None)
    with pytest.raises(HearthError, match="too_many_requests"):
        sessions.admit(session, "c", "convert", 0.0, None)


def test_overdue_requests_are_those_past_their_deadline() -> None:
    sessions = make()
    session = sessions.greet(1, "", 1.0, 0.0)
    late = sessions.admit(session, "a", "generate", 0.0, 5.0)
    sessions.admit(session, "b", "generate", 0.0, None)
    sessions.admit(session, "c", "generate", 0.0, 7.0)
    assert sessions.overdue(4.9) == []
    assert sessions.overdue(5.0) == [late]


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "close", "drop"]), st.integers(0, 3), st.integers(0, 3))
    )
)
def test_the_tables_always_agree(steps: list[tuple[str, int, int]]) -> None:
    sessions = make(clients=4, requests=4)
    ended: set[int] = set()
    seen: set[int] = set()
    for action, who, what in steps:
        session: Session = sessions.greet(who, "", 1.0, 0.0)
        if action == "drop":
            gone = {request.rid for request in sessions.drop(session)}
            assert not gone & ended
            ended |= gone
        elif action == "admit" and str(what) not in session.open:
            seen.add(sessions.admit(session, str(what), "generate", 0.0, None).rid)
        elif action == "close" and str(what) in session.open:
            request = session.open[str(what)]
            assert sessions.close(request)
            assert not sessions.close(request)
            ended.add(request.rid)
        by_session = {r.rid for s in sessions.all() for r in s.open.values()}
        assert by_session == {r.rid for r in sessions.open_requests} == seen - ended


def delta(request_id: str, seq: int, text: str = "x") -> Delta:
    return Delta(id=request_id, seq=seq, text=text, tokens=[seq], logprobs=[])


def done(request_id: str) -> Done:
    return Done(id=request_id, reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1))


def asked(*ids: str) -> list[OpenRequest]:
    sessions = make(requests=len(ids))
    session = sessions.greet(1, "one", 10.0, 0.0)
    return [sessions.admit(session, one, "generate", 0.0, None) for one in ids]


def test_deltas_of_one_request_grow_into_one() -> None:
    outbox, (first, other) = Outbox(), asked("a", "b")
    outbox.add(Accepted(id="a", prompt_tokens=3), now=1.0)
    assert not outbox.merge(first, delta("a", 0))
    outbox.add(delta("a", 0, "one"), 2.0, first)
    outbox.add(delta("b", 0, "other"), 3.0, other)
    log = [TokenLogprob(logprob=-1.0)]
    more = Delta(id="a", seq=0, text=" two", tokens=[7, 8], logprobs=log, ended=9.0)
    assert outbox.merge(first, more)
    outbox.add(done("a"), now=4.0)
    assert outbox.blocked_since == 1.0
    sent: list[Answer] = []
    while (answer := outbox.head()) is not None:
        sent.append(answer)
        outbox.sent(5.0)
    assert sent[1] == Delta(
        id="a", seq=0, text="one two", tokens=[0, 7, 8], logprobs=log, ended=9.0
    )
    assert [type(answer).__name__ for answer in sent] == ["Accepted", "Delta", "Delta", "Done"]
    assert not outbox
    assert outbox.blocked_since == 5.0


def test_a_delta_that_was_sent_grows_no_more() -> None:
    outbox, (request,) = Outbox(), asked("a")
    outbox.add(delta("a", 0), 0.0, request)
    assert outbox.bytes == 320 + 1 + 40
    outbox.sent(0.0)
    assert not outbox.merge(request, delta("a", 1))
    assert outbox.bytes == 0


def test_a_failed_request_leaves_only_its_own_delta() -> None:
    outbox, (first, other, third) = Outbox(), asked("a", "b", "c")
    outbox.add(delta("a", 0), 0.0, first)
    outbox.add(delta("b", 0), 0.0, other)
    outbox.withdraw(first)
    outbox.withdraw(third)
    assert not outbox.merge(first, delta("a", 1))
    head = outbox.head()
    assert isinstance(head, Delta)
    assert head.id == "b"
    assert len(outbox) == 1


def test_a_reply_under_a_used_id_does_not_grow_the_one_before() -> None:
    outbox, (before,), (after,) = Outbox(), asked("a"), asked("a")
    outbox.add(delta("a", 0, "old"), 0.0, before)
    outbox.add(done("a"), 0.0)
    assert outbox.bytes > 0, "an answer counts, whether its request goes on or not"
    assert not outbox.merge(after, delta("a", 0, "new"))
    outbox.add(delta("a", 0, "new"), 0.0, after)
    assert outbox.merge(after, delta("a", 1, "er"))
    texts = []
    while (head := outbox.head()) is not None:
        texts.append(head.text if isinstance(head, Delta) else "done")
        outbox.sent(0.0)
    assert texts == ["old", "done", "newer"]


def test_logprobs_count_among_the_bytes_that_wait() -> None:
    outbox = Outbox()
    logs = [TokenLogprob(logprob=-1.0, top=[(1, -1.0)] * 20)] * 100
    outbox.add(Delta(id="a", seq=0, text="", tokens=[], logprobs=logs), 0.0)
    assert outbox.bytes >= 100 * 20 * 100


def test_conversions_are_counted_until_they_are_sent() -> None:
    outbox = Outbox()
    outbox.add(Tokens(id="a", tokens=[1] * 100), 0.0)
    outbox.add(Detokenized(id="b", text="x" * 50), 0.0)
    assert outbox.bytes == 2 * 320 + 100 * 40 + 50
    outbox.sent(0.0)
    outbox.sent(0.0)
    assert outbox.bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_token_is_lost_doubled_or_reordered(steps: list[tuple[str, bool]]) -> None:
    outbox, requests = Outbox(), dict(zip("abc", asked(*"abc"), strict=True))
    pushed: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    received: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def take() -> None:
        head = outbox.head()
        if isinstance(head, Delta):
            received[head.id] += head.tokens
            outbox.sent(0.0)

    for token, (request_id, reads) in enumerate(steps):
        pushed[request_id].append(token)
        new = Delta(id=request_id, seq=0, text="", tokens=[token])
        if not outbox.merge(requests[request_id], new):
            outbox.add(new, 0.0, requests[request_id])
        assert len(outbox) <= 3
        if reads:
            take()
    while outbox:
        take()
    assert received == pushed
    assert outbox.bytes == 0


def test_the_delta_of_an_earlier_request_that_looks_the_same_stays() -> None:
    outbox, (before,), (after,) = Outbox(), asked("a"), asked("a")
    first, second = delta("a", 0), delta("a", 0)
    outbox.add(first, 1.0, before)
    outbox.add(done("a"), 1.0)
    outbox.add(second, 1.0, after)
    outbox.withdraw(after)
    assert outbox.head() is first
    assert len(outbox) == 2


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


def long_delta(number: int, logprobs: int = 0) -> Delta:
    top = [(1000 + number + one, -0.25 * one - number) for one in range(logprobs)]
    log = [TokenLogprob(logprob=-0.5 * number, top=top)] if logprobs else []
    return Delta(id="a", seq=0, text="word ", tokens=[1000 + number], logprobs=log)


def done_answer(number: int) -> Answer:
    usage = Usage(prompt_tokens=1000 + number, completion_tokens=999 + number, queue_ms=number / 3)
    return Done(id=str(number), reason="stop", usage=usage)


KINDS: dict[str, Any] = {
    "a delta that grows": long_delta,
    "with log probabilities": lambda number: long_delta(number, 5),
    "ends": done_answer,
    "errors": lambda number: Error(id=str(number), code="queue_full", message=f"{number} wait"),
    "ids": lambda number: Tokens(id=str(number), tokens=list(range(number, number + 300))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_is_counted_as_it_lies_in_memory(kind: str) -> None:
    outbox, (request,) = Outbox(), asked("a")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            answer = KINDS[kind](1000 * number)
            if not (isinstance(answer, Delta) and outbox.merge(request, answer)):
                outbox.add(answer, 0.0, request if isinstance(answer, Delta) else None)
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
                        desk.delivery.send_delta(request, long_delta(turn + part))
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
        delivery.send(session, done_answer(number))
        delivery.flush(session)
    assert delivery.behind == [session]
    slow.takes = True
    delivery.flush(session)
    assert not delivery.behind
