from contextlib import closing
from itertools import count

import pytest
import zmq

from daemon.door import curve_socket
from daemon.door.curve_socket import CurveSocket, check_library, open_port
from daemon.door.keys import Keys
from daemon.door.settings import DoorSettings
from daemon.door.socket import Received
from runtime.errors import HearthError


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
    made = CurveSocket(open_port(0), DoorSettings(), keys, count(1, 2))
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
