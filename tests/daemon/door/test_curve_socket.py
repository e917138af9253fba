from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import pytest
import zmq

from hearth.actors.settings import Reloadable
from hearth.daemon.door import curve_socket
from hearth.daemon.door.curve_socket import CurveSocket, check_library, open_port
from hearth.daemon.door.keys import Keys
from hearth.daemon.door.local_socket import STRANGERS
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.runtime.errors import HearthError
from tests.daemon.door.harness import until

CLIENT, SERVER = zmq.curve_keypair(), zmq.curve_keypair()


@pytest.mark.parametrize(
    ("version", "curve", "is_"),
    [((4, 3, 2), True, "4.3.2"), ((4, 2, 9), True, "4.2.9"), ((4, 3, 5), False, "without CURVE")],
)
def test_libraries_that_peers_without_a_key_can_harm_are_refused(
    version: tuple[int, int, int], *, curve: bool, is_: str
) -> None:
    with pytest.raises(HearthError, match=f"4.3.3 or newer.*this is .*{is_}") as caught:
        check_library(version, curve=curve)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "tcp_port")


def test_others_will_do() -> None:
    check_library((4, 3, 3), curve=True)
    check_library((5, 0, 0), curve=True)


def test_a_port_that_is_taken_is_refused_and_given_back_at_the_end() -> None:
    port = open_port(0)
    with pytest.raises(HearthError, match=f"port {port.number} of 127.0.0.1") as caught:
        open_port(port.number)
    assert (caught.value.code, caught.value.field) == ("socket_unusable", "tcp_port")
    port.close()
    open_port(port.number).close()


def test_what_is_held_has_a_bound_and_is_heard_of_keys_that_are_listed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def received(key: str, size: int) -> Received:
        return Received(3, False, b"x" * size, 1, (), f"key:{key}", key, key)

    public, secret = (one.decode() for one in zmq.curve_keypair())
    keys = Keys(public, secret, {"a": "a"})
    made = CurveSocket(open_port(0), Reloadable(DoorSettings().of_text()), keys, count(1, 2))
    with closing(made):
        waiting = [*[received("a", 1 << 20)] * 10, *[received("b", 1)] * 100, received("a", 1)]
        monkeypatch.setattr(made, "_receive", lambda: waiting.pop(0) if waiting else None)
        first = made.receive()
        assert first is not None
        assert (len(first.data), len(waiting)) == (1 << 20, 107)
        heard = 1
        while (one := made.receive()) is not None:
            assert one.key == "a"
            assert made._held <= curve_socket._HELD
            heard += 1
        assert (heard, made.take_counts()[2]) == (11, 100)
        assert (made._held, made._held_bytes) == (0, 0)


@pytest.fixture
def made() -> Iterator[CurveSocket]:
    public, secret = (one.decode() for one in SERVER)
    keys = Keys(public, secret, {CLIENT[0].decode(): "a"})
    with closing(
        CurveSocket(open_port(0), Reloadable(DoorSettings().of_text()), keys, count(1, 2))
    ) as socket:
        yield socket


@contextmanager
def peer(made: CurveSocket) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.curve_serverkey = SERVER[0]
        client.curve_publickey, client.curve_secretkey = CLIENT
        client.connect(f"tcp://127.0.0.1:{made.port}")
        yield client


def test_a_message_of_too_many_frames_is_read_bit_by_bit_and_costs_its_connection(
    made: CurveSocket,
) -> None:
    frames = 20 * curve_socket._FRAMES
    heard: list[bytes] = []

    def receive() -> list[bytes]:
        received = made.receive()
        if received is not None:
            heard.append(received.data)
        return heard

    with peer(made) as client, peer(made) as other:
        watch = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.send_multipart([b"many"] * frames)
        turns = 0
        while not watch.poll(0):
            receive()
        while made.pending:
            receive()
            turns += 1
        assert turns > 10
        other.send(b"other")
        client.send(b"again")
        until(lambda: len(receive()) == 2)
        client.disable_monitor()
        watch.close()
    assert sorted(heard) == [b"again", b"other"]


def test_new_limits_let_more_connect(made: CurveSocket) -> None:
    made._settings.current = DoorSettings(clients=1 - STRANGERS)
    with peer(made) as first, peer(made) as second:

        def heard(client: zmq.Socket[bytes]) -> bool:
            client.send(b"x", zmq.NOBLOCK)
            received = made.receive()
            if received is not None:
                made.session_began(received.connection)
            return received is not None

        until(lambda: heard(first))
        made._settings.current = DoorSettings(clients=2)
        before = len(made._by_number)
        until(lambda: heard(second) and len(made._by_number) > before)


class Frame:
    """The first frame of a message by TCP, and whose it is."""

    def __init__(self, made: CurveSocket, number: int, descriptor: int) -> None:
        self.bytes = b"\0" + ((made._first + number) % (1 << 32)).to_bytes(4, "big")
        self._has = {"User-Id": CLIENT[0].decode(), zmq.SRCFD: descriptor}

    def get(self, name: Any) -> Any:
        return self._has[name]


def test_words_of_one_that_has_left_do_not_silence_who_has_its_descriptor_now(
    made: CurveSocket,
) -> None:
    made._zap.admitted = 2
    left: Any = Frame(made, 1, 20)
    here: Any = Frame(made, 2, 20)
    made._connections[20] = curve_socket._Connection(20, until=10.0)
    # ZeroMQ told that the second had come before the first was heard.
    ghost = made._known(left, delimited=False)
    assert ghost is not None
    number = ghost.number
    made.session_began(number)
    known = made._known(here, delimited=False)
    assert known is not None
    assert known.number != number
    assert made.take_closed() == [number]
    assert made.send(number, b"", delimited=False) == "gone"
    assert made._known(left, delimited=False) is None
    assert made._known(here, delimited=False) is known
