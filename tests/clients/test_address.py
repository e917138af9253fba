import os
from pathlib import Path

import pytest

from hearth_client import Client, NotAllowed, address
from hearth_client.address import resolve_address, socket_path
from hearth_client.errors import ConnectionFailed


def test_the_first_agreed_place_that_exists_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = tmp_path / "system.sock"
    monkeypatch.setattr(address, "SYSTEM_PATH", system)
    environ = {
        "HEARTH_SOCKET": "/a/own.sock",
        "RUNTIME_DIRECTORY": "/run/of-another-program",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    assert socket_path(environ) == Path("/a/own.sock")
    del environ["HEARTH_SOCKET"]
    own = tmp_path / "hearth" / "hearth.sock"
    assert socket_path(environ) == own
    system.touch()
    assert socket_path(environ) == system
    own.parent.mkdir()
    own.touch()
    assert socket_path(environ) == own
    assert socket_path({}) == system


def test_a_socket_of_others_is_refused_with_its_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "h.sock"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotAllowed, match=f"not allowed to use {path}: join the group [a-z]"):
        Client(path).connect()


def test_a_socket_in_a_folder_of_others_is_there_and_not_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "closed"
    plain = Path.stat

    def closed(path: Path, **options: bool) -> os.stat_result:
        if path.parent == folder:
            raise PermissionError
        return plain(path, **options)

    monkeypatch.setattr(Path, "stat", closed)
    monkeypatch.setattr(address, "SYSTEM_PATH", folder / "h.sock")
    assert socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == folder / "h.sock"
    with pytest.raises(NotAllowed, match="join the group that owns it"):
        Client(folder / "h.sock").connect()


@pytest.mark.parametrize("given", ["/a/b.sock", "ipc:///a/b.sock", Path("/a/b.sock")])
def test_paths_and_addresses_are_the_same(given: str | Path) -> None:
    assert resolve_address(given, {}) == "ipc:///a/b.sock"
    assert resolve_address(None, {"HEARTH_SOCKET": str(given)}) == "ipc:///a/b.sock"


def test_the_system_limit_is_checked_in_bytes() -> None:
    assert resolve_address("/" + "x" * 106)
    with pytest.raises(ConnectionFailed, match="has 108 bytes"):
        resolve_address("/" + "x" * 105 + "é")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("inproc://hearth", "not the path of a socket"),
        ("tcp://localhost", "no host and port"),
        ("tcp://localhost:1/x", "no host and port"),
    ],
)
def test_other_transports_are_refused(given: str, why: str) -> None:
    with pytest.raises(ConnectionFailed, match=why):
        resolve_address(given)


def test_tcp_stays_what_it_is() -> None:
    place = "tcp://127.0.0.1:7700"
    assert resolve_address(place) == place
    assert resolve_address(None, {"HEARTH_SOCKET": place}) == place
