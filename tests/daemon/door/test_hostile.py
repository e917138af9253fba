from __future__ import annotations

import gc
import random
import socket as sockets
from collections.abc import Iterator

import msgspec
import pytest
from hearth_client import Client, ConnectionLost, UnsupportedOption

from bench.faults.raw_peer import connected_peer, send_unfinished
from daemon.door.process_bounds import use_of_process
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
        assert hear(first)["t"] == "leased", "the third made the door look whether it is alive"
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


def test_one_unfinished_message_does_not_take_the_memory() -> None:
    with running_door(memory_bytes=48 << 20) as door, Client(door.path) as client:
        generation = client.generate("hang")
        assert client.tokenize("a") == [97]
        before = use_of_process().memory
        with connected_peer(door.path) as peer, pytest.raises(OSError, match=r"Broken|reset"):
            send_unfinished(peer, 400, 1 << 20)
        until(lambda: "connections_closed" in door.totals())
        assert use_of_process().memory - before < 300 << 20
        with pytest.raises(ConnectionLost):
            generation.text()
        assert client.tokenize("a") == [97], "clients come back"
        until(lambda: len(door.actors.cancelled) == 1)
        assert door.totals()["connection_closed"] == 1, "requests and closings count apart"


def test_connections_without_hello_do_not_take_all_files() -> None:
    # Files that earlier tests left for the collector may not be given back meanwhile.
    gc.collect()
    allowed = use_of_process().files + 300
    with running_door(open_files=allowed, handshake_s=60.0) as door, Client(door.path) as client:
        client.connect()
        silent = [sockets.socket(sockets.AF_UNIX) for _ in range(200)]
        for connection in silent:
            connection.connect(str(door.path))
        until(lambda: any(ended(connection) for connection in silent))
        assert door.totals()["connections_closed"] >= 1
        assert client.status().state == "ready"
        for connection in silent:
            connection.close()


def test_clients_that_vanished_give_their_places_free() -> None:
    with running_door(clients=2, lease_s=3600.0) as door:
        with raw_client(door.path) as one, raw_client(door.path) as two:
            greet(one)
            greet(two)
        with raw_client(door.path) as third:
            until(lambda: greet(third)["t"] == "welcome")


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
            patched.setattr(door.door._dispatch, "ask_tokenizer", broken)
            say(client, {"t": "generate", "id": "g", "prompt": "count"})
            error = hear(client)
            assert (error["id"], error["code"]) == ("g", "internal")
        assert door.totals()["internal_errors"] == 2
        say(client, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(client)["tokens"] == [97]
