from __future__ import annotations

import random
import socket as sockets
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from hearth.actors.arena import Arena
from hearth.daemon.door import local_socket
from hearth.daemon.door.curve_socket import memory_of_process
from hearth_client import Client, UnsupportedOption
from tests.daemon.door.harness import (
    BACKENDS,
    Harness,
    greet,
    hear,
    raw_client,
    running_door,
    say,
    until,
)
from tests.system.faults.raw_peer import (
    connected_peer,
    connection,
    has_ended,
    send_message,
    send_unfinished,
)


@pytest.fixture(params=BACKENDS, ids=["asyncio", "uvloop"])
def door(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with running_door(request.param) as harness:
        yield harness


def test_limits_of_clients_and_requests() -> None:
    with (
        running_door(clients=2, requests_per_client=2) as door,
        raw_client(door.path) as first,
        raw_client(door.path) as second,
        raw_client(door.path) as third,
    ):
        greet(first)
        greet(second)
        assert greet(third)["code"] == "too_many_clients"
        for request_id in "abc":
            say(first, {"t": "generate", "id": request_id, "prompt": "silent"})
        error = hear(first)
        assert (error["id"], error["code"]) == ("c", "too_many_requests")
        greet(first)  # a second hello leaves requests alone
        assert door.on_loop(lambda: door.door.open_requests) == 2


def test_an_open_id_is_not_ended_by_errors_about_others(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, {"t": "generate", "id": "a", "prompt": "hang"})
        assert hear(client)["t"] == "accepted"
        say(client, {"t": "generate", "id": "a", "prompt": "count"})
        error = hear(client)
        assert (error.get("id", ""), error["code"], error["field"]) == ("", "duplicate_id", "id")
        say(client, {"t": "generate", "id": "a", "prompt": "count", "top_p": 7})
        error = hear(client)
        assert (error.get("id", ""), error["field"]) == ("", "top_p")
        say(client, {"t": "cancel", "id": "a"})
        assert hear(client)["reason"] == "cancelled"


def test_frames_beyond_the_first_are_refused(door: Harness) -> None:
    good = {"t": "tokenize", "id": "t", "text": "Hi"}
    with raw_client(door.path) as client:
        greet(client)
        for extra in (1, 2, 999):
            say(client, good, *[b"x"] * extra)
            error = hear(client)
            assert (error["code"], error["field"]) == ("unsupported_option", "frames")
            assert error["id"] == "t"
        for frames in ([b""], [b"", b""], [b"", b"", b""]):
            say(client, *frames)
            while not (data := client.recv()):
                pass  # the delimiter comes back where one was sent
            code = msgspec.msgpack.decode(data)["code"]
            assert code == "bad_message"
        say(client, good)
        assert hear(client)["tokens"] == [72, 105]


def test_large_frames_are_answered_and_huge_ones_close_the_connection() -> None:
    with running_door(frame_bytes=1000) as door:
        with raw_client(door.path) as client:
            greet(client)
            say(client, {"t": "tokenize", "id": "t", "text": "x" * 1200})
            error = hear(client)
            assert (error["id"], error["code"]) == ("t", "message_too_large")
            say(client, b"x" * 5000)
            assert not client.poll(100)
        with Client(door.path) as other:
            assert other.tokenize("a") == [97]


def test_unfinished_messages_take_no_more_than_they_may_and_others_go_on() -> None:
    limits: dict[str, Any] = {"images_per_request": 4, "image_bytes": 16 << 20}
    limits["images_in_flight_bytes"] = 64 << 20
    arena = Arena.create("test", 1 << 18)
    with (
        running_door(client_memory_mb=48, arena=arena, **limits) as door,
        Client(door.path) as client,
        connected_peer(door.path) as little,
        connected_peer(door.path) as peer,
    ):
        generation = client.generate("hang")
        assert client.tokenize("a") == [97]
        before = memory_of_process()
        send_unfinished(little, 4, 1 << 20)
        with pytest.raises(OSError, match=r"Broken|reset"):
            send_unfinished(peer, 400, 1 << 20)
        assert memory_of_process() - before < 100 << 20
        until(lambda: door.totals()["connections_closed"] == 1)
        assert not ended(little)
        assert client.tokenize("a") == [97]
        generation.cancel()
        assert generation.text() == ""
    arena.close()


def test_a_message_of_too_many_bytes_closes_its_connection_alone(door: Harness) -> None:
    with Client(door.path) as client, connected_peer(door.path) as peer:
        assert client.tokenize("a") == [97]
        with pytest.raises(OSError, match=r"Broken|reset"):
            send_unfinished(peer, 400, 1 << 20)
        assert client.tokenize("a") == [97]
        assert door.totals()["connections_closed"] == 0


def test_connections_without_a_session_leave_for_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_socket, "STRANGERS", 5)
    with running_door(handshake_s=60.0) as door, Client(door.path) as client:
        generation = client.generate("hang")
        client.tokenize("a")
        silent = [connection(door.path) for _ in range(50)]
        until(lambda: sum(map(has_ended, silent)) == 45)
        assert not any(map(has_ended, silent[45:])), "the oldest go first"
        with Client(door.path) as other:
            assert other.tokenize("a") == [97]
            assert client.status().clients == 2
        generation.cancel()
        for one in silent:
            one.close()


def test_a_client_that_leaves_gives_its_place_free_at_once() -> None:
    with running_door(clients=2, lease_s=3600.0) as door:
        with raw_client(door.path) as one, raw_client(door.path) as two:
            greet(one)
            greet(two)
            say(two, {"t": "generate", "id": "g", "prompt": "hang"})
            assert hear(two)["t"] == "accepted"
        until(lambda: door.sessions() == 0)
        until(lambda: len(door.actors.cancelled) == 1)
        with raw_client(door.path) as third:
            assert greet(third)["t"] == "welcome"
        assert door.totals()["gone"] == 1


def test_a_place_is_free_for_who_comes_right_behind_who_leaves() -> None:
    with running_door(clients=1) as door:
        for _ in range(20):
            with connected_peer(door.path) as peer:
                # It leaves much to be read behind its hello.
                send_message(peer, msgspec.msgpack.encode({"t": "hello", "proto": [1]}))
                for _ in range(100):
                    send_message(peer, b"x" * 1000)
                until(lambda: door.sessions() == 1)
            with raw_client(door.path) as client:
                assert greet(client)["t"] == "welcome"
            until(lambda: door.sessions() == 0)


def test_a_place_is_kept_for_the_operator() -> None:
    with running_door(clients=1) as door, Client(door.path) as client:
        client.connect()
        with Client(door.path, status_only=True) as operator, raw_client(door.path) as other:
            assert operator.status().clients == 2
            with pytest.raises(UnsupportedOption):
                operator.generate("count").text()
            assert greet(other, status_only=True)["code"] == "too_many_clients"
        until(lambda: door.sessions() == 1)
        with raw_client(door.path) as other:
            greet(other, status_only=True)
            error = greet(other)
            assert (error["code"], error["field"]) == ("invalid_value", "status_only")


def test_nothing_but_hello_is_served_first(door: Harness) -> None:
    with raw_client(door.path) as client:
        for message in ({"t": "status", "id": "s"}, {"t": "lease"}, {"t": "cancel", "id": "s"}):
            say(client, message)
            assert hear(client)["code"] == "hello_required"
        say(client, {"t": "hello", "proto": [7]})
        error = hear(client)
        assert (error["code"], error["field"]) == ("unsupported_protocol", "proto")
        assert door.sessions() == 0


def ended(connection: sockets.socket) -> bool:
    """Whether the other side has closed a connection."""
    try:
        return not connection.recv(4096, sockets.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def test_random_bytes_and_half_open_connections_do_no_harm() -> None:
    chance = random.Random(3)
    with running_door(handshake_s=0.3) as door, Client(door.path) as client:
        junk: list[sockets.socket] = []
        for number in range(60):
            connection = sockets.socket(sockets.AF_UNIX)
            connection.connect(str(door.path))
            if number % 3:  # every third says nothing at all
                connection.send(chance.randbytes(1 + chance.randrange(4096)))
            junk.append(connection)
        # A frame of the first ZeroMQ protocol, with an anonymous identity before it.
        junk[0].send(b"\x01\x00" + b"\x04\x00abc")
        assert client.generate("count", max_tokens=3).text() == "0 1 2 "
        until(lambda: all(ended(connection) for connection in junk[3::3]))
        for connection in junk:
            connection.close()
        assert client.tokenize("a") == [97]
        assert "internal_errors" not in door.totals()


def test_garbage_through_a_real_connection_is_always_answered(door: Harness) -> None:
    chance = random.Random(9)
    with raw_client(door.path) as client:
        greet(client)
        for _ in range(300):
            say(client, chance.randbytes(chance.randrange(1, 60)))
            assert hear(client)["t"] == "error"
        assert greet(client)["t"] == "welcome"
        assert door.totals()["refused"] == 300


def test_a_fault_of_ours_ends_one_message_and_not_the_service(
    door: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with raw_client(door.path) as client:
        greet(client)
        with monkeypatch.context() as patched:
            patched.setattr(door.door._requests, "_ask", broken)
            say(client, {"t": "tokenize", "id": "t", "text": "a"})
            error = hear(client)
            assert (error["id"], error["code"]) == ("t", "internal")
            patched.setattr(door.door._tracker, "ask_tokenizer", broken)
            say(client, {"t": "generate", "id": "g", "prompt": "count"})
            error = hear(client)
            assert (error["id"], error["code"]) == ("g", "internal")
        assert door.totals()["internal_errors"] == 2
        say(client, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(client)["tokens"] == [97]
