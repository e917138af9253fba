from __future__ import annotations

import errno
import random
import socket as sockets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from hearth.actors.arena import Arena
from hearth.actors.settings import Reloadable
from hearth.daemon.door import local_socket
from hearth.daemon.door.curve_socket import CurveSocket
from hearth.daemon.door.listener import Listener, open_listener
from hearth.daemon.door.local_socket import LocalSocket
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received, Sent
from hearth.daemon.door.sockets import DoorSockets
from hearth.daemon.door.zmtp import GREETING, header
from hearth_client import Client, ConnectionLost
from tests.daemon.door.harness import greet, hear, running_door, say, until
from tests.system.faults.raw_peer import connected_peer, connection, has_ended, send_message

BEATS: dict[int, Any] = {zmq.HEARTBEAT_IVL: 20, zmq.HEARTBEAT_TIMEOUT: 1000}
PEERS: list[tuple[Any, dict[int, Any]]] = [
    (zmq.DEALER, {}),
    (zmq.DEALER, BEATS),
    (zmq.DEALER, {zmq.ROUTING_ID: b"robot"}),
    (zmq.DEALER, {zmq.ROUTING_ID: b"\0\x6b\x8b\x45\x67", **BEATS}),
    (zmq.REQ, {}),
    (zmq.REQ, {zmq.ROUTING_ID: b"x" * 255, **BEATS}),
]


class Door:
    """A local socket and what it has received."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.listener: Listener = open_listener(str(folder / "s"), {})
        self.socket = LocalSocket(
            self.listener, Reloadable(replace(DoorSettings().of_text(), **settings)), count(2, 2)
        )
        self.path = folder / "s"
        self.heard: list[Received] = []

    def take(self) -> None:
        """Receive all that is there now."""
        while (received := self.socket.receive()) is not None or self.socket.pending:
            if received is not None:
                self.heard.append(received)

    def until(self, condition: Any) -> None:
        """Receive until it is so."""

        def met() -> bool:
            self.take()
            return bool(condition())

        until(met)

    def session(self, peer: sockets.socket) -> int:
        """The connection of a peer that has sent something, with a session from now on."""
        before = len(self.heard)
        send_message(peer, b"hi")
        self.until(lambda: len(self.heard) > before)
        self.socket.session_began(self.heard[-1].connection)
        return self.heard[-1].connection


@pytest.fixture
def door(short_folder: Path) -> Iterator[Door]:
    made = Door(short_folder)
    yield made
    made.socket.close()


@pytest.mark.parametrize(("kind", "options"), PEERS)
def test_peers_of_libzmq_are_served_and_stay(kind: int, options: dict[int, Any]) -> None:
    with running_door() as door, zmq.Context() as context, context.socket(kind) as client:
        for option, value in {zmq.LINGER: 0, zmq.RCVTIMEO: 5000, **options}.items():
            client.setsockopt(option, value)
        watch = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.connect(f"ipc://{door.path}")
        assert greet(client)["t"] == "welcome"
        if zmq.HEARTBEAT_IVL in options:
            assert not watch.poll(1200), "PINGs are answered"
        say(client, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(client)["tokens"] == [97]
        client.disable_monitor()
        watch.close()


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
def test_who_is_no_client_is_left_and_a_dealer_comes_again(kind: int, door: Door) -> None:
    with zmq.Context() as context, context.socket(kind) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, 1)
        watch = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        client.connect(f"ipc://{door.path}")
        if kind == zmq.DEALER:
            client.send(b"one")
            door.until(lambda: door.heard)
            door.socket._close(door.socket._connections[door.heard[0].connection])
            client.send(b"two")
            door.until(lambda: len(door.heard) == 2)
            assert [one.data for one in door.heard] == [b"one", b"two"]
            assert door.heard[0].connection != door.heard[1].connection
        else:
            door.until(lambda: watch.poll(0))
            assert not door.heard
        client.disable_monitor()
        watch.close()


def test_pictures_of_9_mb_arrive_between_heartbeats() -> None:
    side, size = 3000, 3000 * 3000
    frames = [bytes([number]) * size for number in range(3)]
    limits: dict[str, Any] = {"images_per_request": 3, "image_bytes": size}
    limits["images_in_flight_bytes"] = 4 * size
    arena = Arena.create("test", 4 * size)
    parts = [
        {"type": "image", "frame": frame, "encoding": "mono8", "width": side, "height": side}
        for frame in (1, 2, 3)
    ]
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": "hang"}]}
    with (
        running_door(arena=arena, **limits) as door,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        beats = {zmq.HEARTBEAT_IVL: 1, zmq.HEARTBEAT_TIMEOUT: 9000}
        for option, value in {zmq.LINGER: 0, zmq.RCVTIMEO: 9000, **beats}.items():
            client.setsockopt(option, value)
        client.connect(f"ipc://{door.path}")
        greet(client)
        say(client, {"t": "generate", "id": "g", "messages": [turn]}, *frames)
        assert hear(client)["t"] == "accepted"
        visuals = door.actors.prepared[0].visuals
        assert [arena.view(one.frames[0].slot) == frames[n] for n, one in enumerate(visuals)] == [
            True
        ] * 3
    arena.close()


def test_clients_come_back_to_a_daemon_that_was_restarted(short_folder: Path) -> None:
    path = short_folder / "s"
    with running_door(path=path) as door:
        client = Client(door.path)
        assert client.tokenize("a") == [97]
    with running_door(path=path), client:
        until(lambda: answered(client))


def answered(client: Client) -> bool:
    try:
        return client.tokenize("b") == [98]
    except ConnectionLost:
        return False


def test_a_message_says_whose_it_is_and_numbers_are_not_used_again(door: Door) -> None:
    seen = []
    for _ in range(3):
        with connected_peer(door.path) as peer:
            seen.append(door.session(peer))
        door.until(lambda: door.socket.take_closed() == [seen[-1]])
        assert door.socket.send(seen[-1], b"late", delimited=False) == "gone"
    assert seen == [2, 4, 6]
    assert {one.peer for one in door.heard} == {f"uid:{local_uid()}"}


def local_uid() -> int:
    return Path("/proc/self").stat().st_uid


def test_what_a_peer_does_not_read_is_kept_to_one_answer(door: Door) -> None:
    with connected_peer(door.path) as peer:
        number = door.session(peer)
        answers = [bytes([index]) * 100_000 for index in range(100)]
        sent = 0
        while door.socket.send(number, answers[sent], delimited=False) == "sent":
            sent += 1
        assert 0 < sent < 50
        # A PING is answered behind what waits, and no more PINGs are than are bounded.
        peer.sendall(b"\x04\x07\x04PING\0\0" * 1000)
        door.take()
        (kept,) = door.socket._connections.values()
        assert 0 < len(kept.unsent) < 110_000
        data, wanted = bytearray(), b"".join(header(100_000) + one for one in answers[:sent])
        peer.setblocking(False)
        while not data.endswith(b"\x04\x05\x04PONG") or wanted not in data:
            door.take()
            try:
                data += peer.recv(1 << 16)
            except BlockingIOError:
                continue
        assert door.socket.send(number, b"x", delimited=True) == "sent"
        door.take()
        assert not kept.unsent


def test_it_says_who_takes_no_more_and_who_takes_more_again(door: Door) -> None:
    with connected_peer(door.path) as peer:
        number = door.session(peer)
        assert not door.socket.full(number)
        size = 1_000_000
        assert door.socket.send(number, bytes(size), delimited=False) == "sent"
        assert door.socket.full(number)
        assert door.socket.send(number, b"more", delimited=False) == "full"
        left = len(GREETING) + len(header(size)) + size
        while door.socket.full(number):
            left -= len(peer.recv(1 << 16))
        assert left < size
        assert door.socket.send(number, bytes(size), delimited=False) == "sent"
    assert not door.socket.full(number), "it is gone"
    assert door.socket.take_closed() == [number]


def test_the_last_answers_leave_when_it_closes(short_folder: Path) -> None:
    door = Door(short_folder)
    with connected_peer(door.path) as peer, connected_peer(door.path) as deaf:
        number = door.session(peer)
        assert door.socket.send(number, b"x" * 4_000_000 + b"end", delimited=False) == "sent"
        assert door.socket.send(door.session(deaf), b"x" * 4_000_000, delimited=False) == "sent"
        closing = threading.Thread(target=door.socket.close)
        closing.start()
        data = bytearray()
        while part := peer.recv(1 << 16):
            data += part
        assert data.endswith(b"xend")
        closing.join(10)
    assert not door.path.exists()


def test_who_does_not_shake_hands_in_time_is_left(short_folder: Path) -> None:
    door = Door(short_folder, handshake_s=2.0)
    with connection(door.path) as silent, connected_peer(door.path) as peer:
        number = door.session(peer)
        door.socket.tick(100.0)
        door.socket.tick(101.9)
        assert not has_ended(silent)
        door.socket.tick(102.0)
        assert has_ended(silent)
        assert door.socket.send(number, b"x", delimited=False) == "sent"
    door.socket.close()


def test_a_user_with_fewer_connections_is_not_put_out_by_one_with_many(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "STRANGERS", 4)
    with ExitStack() as stack:
        other = stack.enter_context(connection(door.path))
        door.until(lambda: door.socket._connections)
        for one in door.socket._connections.values():
            one.uid = 7
        mine = [stack.enter_context(connection(door.path)) for _ in range(10)]
        door.until(lambda: sum(map(has_ended, mine)) == 7)
        assert [has_ended(one) for one in mine] == [True] * 7 + [False] * 3
        assert not has_ended(other)


def test_a_user_who_takes_little_memory_is_not_put_out_by_one_with_many_connections(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(connected_peer(door.path))
        number = door.session(other)
        door.socket._connections[number].uid = 7
        mine = [stack.enter_context(connected_peer(door.path)) for _ in range(3)]
        for peer in mine:
            door.session(peer)
            peer.setblocking(False)
        other.setblocking(False)
        for peer, size in ((other, 30_000), *((one, 20_000) for one in mine)):
            peer.sendall(header(1_000_000) + bytes(size))
        most = 30_000 + 3 * 20_000
        door.until(lambda: door.socket._held == most)
        monkeypatch.setattr(DoorSettings, "memory_bytes", most)
        mine[2].sendall(b"x")
        door.until(lambda: door.socket.overweight)
        assert [has_ended(one) for one in (other, *mine)] == [False, False, False, True]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_is_what_is_there_whatever_peers_do(
    seed: int, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, peers = random.Random(seed), list[sockets.socket]()
    monkeypatch.setattr(local_socket, "STRANGERS", 8)
    monkeypatch.setattr(DoorSettings, "memory_bytes", 2_000_000)
    for _ in range(1500):
        what = chance.choice(("come", "send", "read", "leave", "answer", "end", "begin"))
        numbers = list(door.socket._connections)
        with suppress(OSError):
            if what == "come" and len(peers) < 20:
                peer = chance.choice((connection, connected_peer))(door.path)
                peer.setblocking(False)
                peers.append(peer)
            elif what == "send" and peers:
                data = chance.choice((header(300_000), b"\4\7\4PING\0\0", b"\0\1x", b"\1\0"))
                chance.choice(peers).send(data + b"\0\xff" * chance.choice((0, 10, 75_000)))
            elif what == "read" and peers:
                chance.choice(peers).recv(chance.choice((1, 100_000)))
            elif what == "leave" and peers:
                peers.pop(chance.randrange(len(peers))).close()
        if what == "answer" and numbers:
            size = chance.choice((10, 400_000))
            door.socket.send(chance.choice(numbers), bytes(size), delimited=False)
        elif what in {"begin", "end"} and numbers:
            change = door.socket.session_began if what == "begin" else door.socket.session_ended
            change(chance.choice(numbers))
        if chance.random() < 0.5:
            door.take()
        there = door.socket._connections.values()
        assert door.socket._held == sum(one.held for one in there) <= 2_000_000
        assert all(one.held == one.zmtp.held + len(one.unsent) for one in there)
    for peer in peers:
        peer.close()
    door.until(lambda: not door.socket._connections)
    assert (door.socket._held, door.socket._without_session, door.socket._by_descriptor) == (
        0,
        {},
        {},
    )


def test_without_handles_the_oldest_stranger_leaves_and_then_others_wait(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected_peer(door.path) as peer, connection(door.path) as stranger:
        number = door.session(peer)
        until_there = lambda: len(door.socket._connections) == 2  # noqa: E731
        door.until(until_there)
        accept = door.listener.accept

        def refuse() -> sockets.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(door.listener, "accept", refuse)
        with connection(door.path) as late:
            door.until(lambda: has_ended(stranger))
            door.until(lambda: not door.socket._accepts)
            assert door.socket._epoll.poll(0) == [], "nothing turns meanwhile"
            assert door.socket.send(number, b"x", delimited=False) == "sent"
            monkeypatch.setattr(door.listener, "accept", accept)
            door.socket.tick(1.0)
            door.until(until_there)
            assert not has_ended(late)


def test_a_flood_leaves_others_each_second_turn(door: Door) -> None:
    with connected_peer(door.path) as flood, connected_peer(door.path) as peer:
        loud, quiet = door.session(flood), door.session(peer)
        door.heard.clear()
        flood.sendall((header(2) + b"xx") * 5000)
        for _ in range(3):
            send_message(peer, b"hi")
        order = []
        while (received := door.socket.receive()) is not None:
            order.append(received.connection)
        assert (order.count(loud), order.count(quiet)) == (5000, 3)
        assert [place for place, one in enumerate(order) if one == quiet][-1] < 10


def test_garbage_behind_the_handshake_harms_nobody(door: Door) -> None:
    with connected_peer(door.path) as peer, connected_peer(door.path) as junk:
        number = door.session(peer)
        junk.sendall(msgspec.msgpack.encode({"t": "hello"}) * 10)
        door.until(lambda: has_ended(junk))
        assert door.socket.take_closed() == []
        assert door.socket.send(number, b"x", delimited=False) == "sent"


def test_who_has_cost_the_least_is_received_first(door: Door) -> None:
    with connected_peer(door.path) as dear, connected_peer(door.path) as cheap:
        first, second = door.session(dear), door.session(cheap)
        door.socket.charge(door.heard[0], 1.0)
        for _ in range(10):
            send_message(dear, b"dear")
            send_message(cheap, b"cheap")
        door.heard.clear()
        door.until(lambda: len(door.heard) == 20)
        assert [one.connection for one in door.heard] == [*[second] * 10, *[first] * 10]


def test_what_it_takes_to_read_is_charged_too(door: Door) -> None:
    with connected_peer(door.path) as many, connected_peer(door.path) as few:
        first, second = door.session(many), door.session(few)
        many.sendall(200 * (header(1) + b"x"))
        door.heard.clear()
        door.until(lambda: len(door.heard) == 200)
        send_message(many, b"")
        send_message(few, b"")
        door.heard.clear()
        door.until(lambda: len(door.heard) == 2)
        assert [one.connection for one in door.heard] == [second, first]


class FakeSocket:
    """Has so many messages of one client."""

    def __init__(self, data: bytes, messages: int, connection: int = 0) -> None:
        self.connection = connection
        self.data = data
        self.messages = messages
        self.sent: list[tuple[int, bytes, bool]] = []

    def receive(self) -> Received | None:
        if not self.messages:
            return None
        self.messages -= 1
        return Received(self.connection, delimited=False, data=self.data, frames=1)

    def charge(self, received: Received, seconds: float) -> None:
        assert (received.connection, seconds > 0) == (self.connection, True)

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        self.sent.append((connection, data, delimited))
        return "sent"


def both(local: FakeSocket, tcp: FakeSocket) -> DoorSockets:
    return DoorSockets(cast("LocalSocket", local), cast("CurveSocket", tcp))


@pytest.mark.parametrize(
    ("costs", "order"),
    [
        ({"l": 1, "t": 1}, "ltltltllll"),
        ({"l": 4, "t": 1}, "lttttltttt"),
        ({"l": 1, "t": 2}, "ltlltlltll"),
    ],
)
def test_both_share_the_time_and_none_is_missed(costs: dict[str, int], order: str) -> None:
    messages = {one: order.count(one) for one in "lt"}
    sockets = both(FakeSocket(b"l", messages["l"], 2), FakeSocket(b"t", messages["t"], 3))
    heard = ""
    while (received := sockets.receive()) is not None:
        heard += received.data.decode()
        sockets.charge(received, costs[heard[-1]])
    assert heard == order


def test_one_that_was_silent_is_owed_nothing() -> None:
    local, tcp = FakeSocket(b"l", 100, 2), FakeSocket(b"t", 0, 3)
    sockets, heard = both(local, tcp), ""
    for turn in range(30):
        if turn == 20:
            tcp.messages = 100
        received = sockets.receive()
        assert received is not None
        heard += received.data.decode()
        sockets.charge(received, 1.0)
    assert heard[20:].count("t") == pytest.approx(5, abs=1)


def test_answers_find_their_way() -> None:
    local, tcp = FakeSocket(b"l", 1, 6), FakeSocket(b"t", 1, 3)
    sockets = both(local, tcp)
    first, second = sockets.receive(), sockets.receive()
    assert first is not None
    assert second is not None
    sockets.send(second.connection, b"to tcp", delimited=True)
    sockets.send(first.connection, b"to local", delimited=False)
    assert tcp.sent == [(3, b"to tcp", True)]
    assert local.sent == [(6, b"to local", False)]
