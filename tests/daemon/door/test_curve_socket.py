import pytest

from daemon.door.curve_socket import check_library, open_port
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
