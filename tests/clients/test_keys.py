from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from hearth_client import Client, ConnectionFailed, NotAllowed, address
from hearth_client.address import resolve_address, socket_path
from hearth_client.keys import client_keys, resolve_with_keys

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
SERVER = zmq.curve_keypair()[0].decode()
PLACE = "tcp://127.0.0.1:7700"


def key_file(path: Path, *lines: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(["#   ****  a comment  ****", "metadata", "curve", *lines]))
    path.chmod(mode)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return key_file(
        tmp_path / "robot",
        f'    server-key = "{SERVER}"',
        f"    public-key = '{PUBLIC}'",
        f"    secret-key = {SECRET}",
    )


def test_a_file_of_the_daemon_s_has_all_that_is_needed(own: Path) -> None:
    assert resolve_with_keys(PLACE, own, None) == (PLACE, (SECRET, SERVER))
    assert client_keys(str(own), None, {}) == (SECRET, SERVER)
    assert client_keys(None, None, {"HEARTH_KEY": str(own)}) == (SECRET, SERVER)


def test_a_file_made_elsewhere_needs_the_daemon_s_public_key(tmp_path: Path) -> None:
    path = key_file(tmp_path / "k", f'public-key = "{PUBLIC}"', f'secret-key = "{SECRET}"')
    assert client_keys(path, SERVER, {}) == (SECRET, SERVER)
    assert client_keys(path, None, {"HEARTH_SERVER_KEY": SERVER}) == (SECRET, SERVER)
    for wrong in (None, "short", PLACE):
        with pytest.raises(ConnectionFailed, match=r"server_key .* must be the daemon"):
            client_keys(path, wrong, {})


def test_values_serve_as_well() -> None:
    assert client_keys(SECRET, SERVER, {}) == (SECRET, SERVER)


@pytest.mark.parametrize(
    ("lines", "mode", "why"),
    [
        ([f'secret-key = "{SECRET}"'], 0o640, "has mode 0640.*chmod 600 "),
        ([f'public-key = "{PUBLIC}"'], 0o600, "holds no secret key"),
        (['secret-key = "short"'], 0o600, "secret-key is no key of 40 characters"),
        ([], 0o600, "is no key file"),
    ],
)
def test_files_that_will_not_do_are_refused(
    tmp_path: Path, lines: list[str], mode: int, why: str
) -> None:
    with pytest.raises(ConnectionFailed, match=why):
        client_keys(key_file(tmp_path / "k", *lines, mode=mode), SERVER, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=f"cannot read the key file {tmp_path}/none: No"):
        client_keys(tmp_path / "none", SERVER, {})


def test_no_key_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEARTH_KEY", raising=False)
    with pytest.raises(ConnectionFailed, match=r"wants a key.*hearth keys add"):
        Client(PLACE)


def test_a_local_socket_asks_for_no_key(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionFailed, match="is a local socket"):
        Client("/h.sock", client_key=own)
    monkeypatch.setenv("HEARTH_KEY", "/none")
    assert resolve_with_keys("/h.sock", None, None) == ("ipc:///h.sock", None)


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
