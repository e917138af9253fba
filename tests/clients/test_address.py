from pathlib import Path

import pytest
from hearth_client.address import resolve_address, socket_path
from hearth_client.errors import ConnectionFailed


def test_the_agreed_places_in_their_order() -> None:
    environ = {
        "HEARTH_SOCKET": "/a/own.sock",
        "RUNTIME_DIRECTORY": "/run/one:/run/two",
        "XDG_RUNTIME_DIR": "/run/user/1",
    }
    assert socket_path(environ) == Path("/a/own.sock")
    del environ["HEARTH_SOCKET"]
    assert socket_path(environ) == Path("/run/one/hearth.sock")
    environ["RUNTIME_DIRECTORY"] = ""
    assert socket_path(environ) == Path("/run/user/1/hearth/hearth.sock")
    assert socket_path({}) == Path("/run/hearth/hearth.sock")


@pytest.mark.parametrize("given", ["/a/b.sock", "ipc:///a/b.sock", Path("/a/b.sock")])
def test_paths_and_addresses_are_the_same(given: str | Path) -> None:
    assert resolve_address(given, {}) == "ipc:///a/b.sock"
    assert resolve_address(None, {"HEARTH_SOCKET": str(given)}) == "ipc:///a/b.sock"


def test_the_system_limit_is_checked_in_bytes() -> None:
    assert resolve_address("/" + "x" * 106)
    with pytest.raises(ConnectionFailed, match="has 108 bytes"):
        resolve_address("/" + "x" * 105 + "é")


def test_other_transports_are_refused() -> None:
    with pytest.raises(ConnectionFailed, match="not the path of a socket"):
        resolve_address("tcp://localhost:1")
