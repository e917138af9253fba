import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.actors.settings import Reloadable
from hearth.daemon.door.sessions import Session, Sessions
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.state import _MOST_S
from hearth.runtime.errors import HearthError
from hearth_client.protocol import Leased
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
