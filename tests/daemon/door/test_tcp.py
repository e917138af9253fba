from __future__ import annotations

import os
import random
import socket as sockets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hearth.actors.arena import Arena
from hearth.actors.settings import Reloadable
from hearth.daemon.door import curve_socket, zap
from hearth.daemon.door.curve_socket import CurveSocket, Growth, open_port
from hearth.daemon.door.keys import add_client, make_server_keys, read_keys, remove_client
from hearth.daemon.door.settings import DoorSettings
from hearth_client import AsyncClient, Client, ConnectionLost, ConnectionTimeout, Image, NotAllowed
from hearth_client.keys import read_key_file
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
from tests.daemon.door.test_wire import ended
from tests.system.faults.raw_peer import connected_peer, send_message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The daemon's keys; the file of the client `robot` is beside."""
    make_server_keys(tmp_path / "keys")
    add_client(tmp_path / "keys", "robot", hand_over=tmp_path / "robot")
    return tmp_path / "keys"


@pytest.fixture
def key(folder: Path) -> Path:
    return folder.parent / "robot"


def address_of(door: Harness) -> str:
    return f"tcp://127.0.0.1:{door.door.tcp_port}"


def tcp_of(door: Harness) -> CurveSocket:
    """Its socket on TCP; for the door's thread, but for what does not change."""
    socket = door.door._socket.tcp
    assert socket is not None
    return socket


def counts(door: Harness) -> tuple[int, int, int]:
    """Connections, handshakes that succeeded and refusals on TCP so far."""
    totals, refused = door.totals(), door.on_loop(lambda: door.door.state.refusals["not_allowed"])
    return totals.get("tcp_connections", 0), totals.get("tcp_handshakes", 0), refused


@contextmanager
def raw_tcp(
    door: Harness, key: Path | None, routing_id: bytes = b""
) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        if key is not None:
            own = read_key_file(key)
            socket.setsockopt(zmq.CURVE_SERVERKEY, own.server.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        if routing_id:
            socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.connect(address_of(door))
        yield socket


@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "uvloop"])
def test_a_listed_key_is_served_beside_the_local_socket(
    folder: Path, key: Path, backend: dict[str, bool]
) -> None:
    with running_door(backend, keys=read_keys(folder)) as door, Client(door.path) as local:
        with Client(address_of(door), client_key=key, name="mine") as client:
            assert client.generate("count", max_tokens=3).text() == "0 1 2 "
            assert local.generate("count", max_tokens=3).text() == "0 1 2 "
            names = door.on_loop(lambda: [one.client for one in door.door.sessions.all()])
            assert sorted(names) == ["hearth-client-python", "robot"]
            peers = door.on_loop(lambda: {one.peer for one in door.door.sessions.all()})
            assert peers == {f"uid:{os.getuid()}", f"key:{read_key_file(key).public}"}
        until(lambda: door.sessions() == 1)
        until(lambda: counts(door)[1] == 1)
        assert counts(door)[2] == 0


def test_pictures_come_by_tcp_as_well(folder: Path, key: Path) -> None:
    arena = Arena.create("test", 1 << 18)
    limits: dict[str, Any] = {"images_per_request": 1, "image_bytes": 1 << 17}
    limits["images_in_flight_bytes"] = 1 << 18
    frame = bytes(range(250)) * 400
    with running_door(keys=read_keys(folder), arena=arena, **limits) as door:
        image = Image(memoryview(frame).cast("B", (250, 400)), "mono8")
        with Client(address_of(door), client_key=key) as client:
            turn = {"role": "user", "content": [image, "hang"]}
            _open = client.generate(messages=[turn])
            until(lambda: door.actors.prepared)
            (visual,) = door.actors.prepared[0].visuals
            assert arena.view(visual.frames[0].slot) == frame
        until(lambda: door.sessions() == 0)
    arena.close()


@pytest.mark.anyio
async def test_the_asyncio_client_comes_by_tcp_too(folder: Path, key: Path) -> None:
    with running_door(keys=read_keys(folder)) as door:
        async with AsyncClient(address_of(door), client_key=key) as client:
            assert (await client.status()).clients == 1
        remove_client(folder, "robot")
        door.on_loop(lambda: door.door.allow(read_keys(folder).clients))
        with pytest.raises(NotAllowed, match="does not list this key"):
            await AsyncClient(address_of(door), client_key=key).connect()


@pytest.mark.parametrize("routing_id", [b"robot", b"\0abcd"], ids=["a name", "as ZeroMQ gives"])
def test_who_chooses_a_routing_id_is_told_and_closed(
    folder: Path, key: Path, routing_id: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_socket, "_SILENT_S", 0.3)
    with running_door(keys=read_keys(folder)) as door, raw_tcp(door, key) as plain:
        greet(plain)
        if routing_id.startswith(b"\0"):
            routing_id = b"\0" + ((tcp_of(door)._first + 1000) % (1 << 32)).to_bytes(4, "big")
        with raw_tcp(door, key, routing_id=routing_id) as client:
            for message in ({"t": "hello", "proto": [1]}, {"t": "status", "id": "s"}):
                say(client, message)
                error = hear(client)
                assert (error["code"], error["field"]) == ("unsupported_option", "routing_id")
                assert "id" not in error
            watch = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            assert watch.poll(5000), "it has been closed"
            client.disable_monitor()
            watch.close()
        assert door.sessions() == 1
        say(plain, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(plain)["tokens"] == [97]


def test_routing_ids_begin_at_another_number_each_time(folder: Path) -> None:
    keys, firsts = read_keys(folder), set()
    for _ in range(3):
        socket = CurveSocket(open_port(0), Reloadable(DoorSettings().of_text()), keys, count(1, 2))
        firsts.add(socket._first)
        socket.close()
    assert len(firsts) == 3
    assert 0x6B8B4567 not in firsts, "where glibc begins without a seed"


def test_a_client_that_leaves_gives_its_place_free_at_once(folder: Path, key: Path) -> None:
    with running_door(keys=read_keys(folder), clients=1, lease_s=3600.0) as door:
        with raw_tcp(door, key) as client:
            greet(client)
            say(client, {"t": "generate", "id": "g", "prompt": "hang"})
            assert hear(client)["t"] == "accepted"
        until(lambda: door.sessions() == 0)
        until(lambda: len(door.actors.cancelled) == 1)
        with raw_tcp(door, key) as client:
            assert greet(client)["t"] == "welcome"


def test_a_key_that_comes_too_often_is_let_in_later(
    folder: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zap, "BURST", 1)
    with (
        running_door(keys=read_keys(folder)) as door,
        raw_tcp(door, key) as first,
        raw_tcp(door, key) as second,
    ):
        assert [greet(one)["t"] for one in (first, second)] == ["welcome"] * 2


def test_connections_that_say_nothing_are_closed_and_those_of_clients_stay(
    folder: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_socket, "_SILENT_S", 0.3)
    with (
        running_door(keys=read_keys(folder), handshake_s=60.0) as door,
        raw_tcp(door, key) as client,
    ):
        greet(client)
        silent = [sockets.create_connection(("127.0.0.1", door.door.tcp_port)) for _ in range(3)]
        until(lambda: all(map(over, silent)))
        say(client, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(client)["tokens"] == [97]
        for one in silent:
            one.close()


def test_connections_without_a_session_leave_for_newer_ones(
    folder: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_socket, "STRANGERS", 4)
    with (
        running_door(keys=read_keys(folder), clients=1, handshake_s=60.0) as door,
        raw_tcp(door, key) as client,
    ):
        greet(client)
        silent = [sockets.create_connection(("127.0.0.1", door.door.tcp_port)) for _ in range(20)]
        until(lambda: sum(map(over, silent)) == 16)
        assert not any(map(over, silent[16:]))
        say(client, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(client)["tokens"] == [97]
        for one in silent:
            one.close()


def test_a_daemon_that_grows_closes_what_came_by_tcp_and_nothing_else(
    folder: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_door(keys=read_keys(folder)) as door,
        Client(door.path) as local,
        Client(address_of(door), client_key=key) as client,
    ):
        _open = local.generate("hang")
        assert client.tokenize("a") == [97]
        with monkeypatch.context() as grown:
            grown.setattr(Growth, "exceeds", lambda _self, _most: True)
            until(lambda: door.totals()["connections_closed"] > 0)
        until(lambda: answered(client))
        assert local.tokenize("a") == [97]
        assert door.on_loop(lambda: door.door.open_requests) == 1, "the local socket went on"


def test_who_is_not_listed_is_refused_at_once_and_counted(folder: Path, key: Path) -> None:
    remove_client(folder, "robot")
    with running_door(keys=read_keys(folder)) as door, Client(door.path) as local:
        with pytest.raises(NotAllowed, match="does not list this key"):
            Client(address_of(door), client_key=key, timeout=60.0).connect()
        until(lambda: counts(door)[2] >= 1)
        assert counts(door)[1] == 0
        assert local.tokenize("a") == [97]
        assert door.sessions() == 1


def test_another_server_key_finds_nobody_within_its_time(folder: Path, key: Path) -> None:
    other = zmq.curve_keypair()[0].decode()
    with running_door(keys=read_keys(folder)) as door:
        client = Client(address_of(door), client_key=key, server_key=other, timeout=0.3)
        with pytest.raises(ConnectionTimeout, match="is server_key its public key"):
            client.connect()
        until(lambda: counts(door)[0] >= 1)
        assert counts(door)[1:] == (0, 0)
        assert door.sessions() == 0


def test_plain_clients_junk_and_half_open_connections_get_nowhere(folder: Path, key: Path) -> None:
    chance = random.Random(5)
    with (
        running_door(keys=read_keys(folder), handshake_s=0.3) as door,
        raw_tcp(door, None) as plain,
        Client(door.path) as local,
        Client(address_of(door), client_key=key) as client,
    ):
        with suppress(zmq.Again):  # it gives up where the other side wants keys
            plain.send(msgspec.msgpack.encode({"t": "hello", "proto": [1]}), zmq.NOBLOCK)
        junk = [sockets.create_connection(("127.0.0.1", door.door.tcp_port)) for _ in range(30)]
        for number, connection in enumerate(junk[:20]):
            # Half of it begins as ZeroMQ's greeting does.
            connection.send(b"\xff" * (number % 2) + chance.randbytes(1 + chance.randrange(2000)))
        junk[20].send(b"\x01\x00\x04\x00abc")  # ZMTP 1.0, which knows no keys
        assert local.generate("count", max_tokens=3).text() == "0 1 2 "
        assert client.generate("count", max_tokens=3).text() == "0 1 2 "
        until(lambda: all(over(connection) for connection in junk))
        for connection in junk:
            connection.close()
        assert not plain.poll(0)
        until(lambda: counts(door)[0] >= 32)
        assert counts(door)[1:] == (1, 0)
        assert "internal_errors" not in door.totals()


def answered(client: Client) -> bool:
    try:
        return client.tokenize("a") == [97]
    except ConnectionLost:
        return False


def over(connection: sockets.socket) -> bool:
    try:
        return ended(connection)
    except ConnectionResetError:
        return True


def test_a_key_that_is_taken_off_ends_its_sessions_and_no_others(folder: Path, key: Path) -> None:
    add_client(folder, "arm", hand_over=folder.parent / "arm")
    with (
        running_door(keys=read_keys(folder)) as door,
        raw_tcp(door, key) as robot,
        Client(address_of(door), client_key=folder.parent / "arm") as arm,
        Client(door.path) as local,
    ):
        greet(robot)
        say(robot, {"t": "generate", "id": "r", "prompt": "hang"})
        assert hear(robot)["t"] == "accepted"
        running = [one.generate("count", max_tokens=200) for one in (arm, local)]
        remove_client(folder, "robot")
        door.on_loop(lambda: door.door.allow(read_keys(folder).clients))
        assert [(e["id"], e["code"]) for e in [hear(robot)]] == [("r", "not_allowed")]
        error = hear(robot)
        assert (error.get("id", ""), error["code"]) == ("", "not_allowed")
        assert [len(one.text().split()) for one in running] == [200, 200]
        before = counts(door)[2]
        known = door.on_loop(lambda: list(tcp_of(door)._by_number.values()))
        (its,) = [one.number for one in known if one.key == read_key_file(key).public]
        late = door.on_loop(lambda: tcp_of(door).send(its, b"late", delimited=False))
        assert late == "gone"
        say(robot, {"t": "hello", "proto": [1]})  # its connection is still open
        until(lambda: counts(door)[2] == before + 1)
        assert not robot.poll(0)
        until(lambda: len(door.actors.cancelled) == 1)


def test_a_key_that_is_added_is_let_in_without_a_new_start(folder: Path) -> None:
    with running_door(keys=read_keys(folder)) as door:
        add_client(folder, "arm", hand_over=folder.parent / "arm")
        door.on_loop(lambda: door.door.allow(read_keys(folder).clients))
        with Client(address_of(door), client_key=folder.parent / "arm") as client:
            assert client.tokenize("a") == [97]


def test_a_flood_on_tcp_leaves_the_local_socket_its_turns(folder: Path, key: Path) -> None:
    with (
        running_door(keys=read_keys(folder)) as door,
        raw_tcp(door, key) as flood,
        Client(door.path) as local,
    ):
        greet(flood)
        local.connect()
        with suppress(zmq.Again):
            for _ in range(3000):
                flood.send(b"\xc1", zmq.NOBLOCK)
        assert local.tokenize("a") == [97]
        assert door.sessions() == 2


def test_only_this_machines_own_address_is_bound(folder: Path) -> None:
    with running_door(keys=read_keys(folder)) as door:
        port = f"{door.door.tcp_port:04X}"
        listening = [
            line.split()[1]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{port}") and line.split()[3] == "0A"
        ]
        assert listening == [f"0100007F:{port}"]


ASKED = 60


def test_a_stop_answers_more_requests_than_the_socket_takes_at_once() -> None:
    with running_door(requests_per_client=ASKED, send_mark=4) as door, raw_client(door.path) as raw:
        greet(raw)
        for number in range(ASKED):
            say(raw, {"t": "generate", "id": str(number), "prompt": "hang"})
        until(lambda: door.on_loop(lambda: door.door.open_requests) == ASKED)
        ended: dict[str, str] = {}
        door.portal.start_task_soon(door.door.stop)
        while len(ended) < ASKED:
            answer = hear(raw)
            if answer["t"] == "error":
                assert answer["id"] not in ended
                ended[answer["id"]] = answer["code"]
    assert set(ended.values()) == {"shutting_down"}


def test_a_stop_does_not_wait_for_a_client_that_never_reads() -> None:
    with running_door(requests_per_client=ASKED, send_mark=4) as door, raw_client(door.path) as raw:
        greet(raw)
        for number in range(ASKED):
            say(raw, {"t": "generate", "id": str(number), "prompt": "hang"})
        until(lambda: door.on_loop(lambda: door.door.open_requests) == ASKED)
        door.portal.call(door.door.stop)
        started = time.monotonic()
        door.portal.call(door.door.ended.wait)
        assert time.monotonic() - started < 30


def test_a_stop_answers_who_reads_again_behind_what_was_left_unread() -> None:
    with running_door() as door, connected_peer(door.path) as peer:
        encode = msgspec.msgpack.encode
        send_message(peer, encode({"t": "hello", "proto": [1]}))
        send_message(peer, encode({"t": "generate", "id": "open", "prompt": "hang"}))
        for number in range(40):
            tokens = [120] * 60_000
            send_message(peer, encode({"t": "detokenize", "id": str(number), "tokens": tokens}))
        delivery = door.on_loop(lambda: door.door._tracker.delivery)
        until(lambda: door.on_loop(lambda: len(delivery.behind) and door.door.open_requests == 1))
        door.portal.start_task_soon(door.door.stop)
        until(lambda: not door.door.open_requests)
        heard = b""
        while part := peer.recv(1 << 20):
            heard += part
    assert b"shutting_down" in heard
