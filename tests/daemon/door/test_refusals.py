"""Refusals at the door: before anything is encoded, and with a hint when to come again."""

from __future__ import annotations

import pytest

from hearth.actors.settings import PolicySettings
from hearth.daemon.door.settings import DoorSettings
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
