from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from hearth_client import Client, ConnectionFailed
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
