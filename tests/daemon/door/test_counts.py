"""What the door tells the daemon itself: the scheduler's load, and what was refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hearth.actors.messages import Failed
from hearth.actors.settings import PolicySettings
from hearth.daemon.door import front_door
from hearth.daemon.door.request_tracker import OWN_REPORT
from hearth_client import Client
from tests.daemon.door.harness import greet, hear, raw_client, running_door, say
from tests.daemon.door.test_request_tracker import Desk


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
