from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from hearth.daemon.door import keys as module
from hearth.daemon.door.keys import (
    add_client,
    keys_folder,
    make_server_keys,
    read_keys,
    remove_client,
)
from hearth.runtime.errors import HearthError
from hearth_client.keys import read_key_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_server_keys(tmp_path / "etc" / "keys")
    return tmp_path / "etc" / "keys"


@pytest.mark.parametrize(
    ("setting", "environ", "place"),
    [
        ("/k", {"STATE_DIRECTORY": "/s"}, "/k"),
        ("", {"STATE_DIRECTORY": "/s", "XDG_CONFIG_HOME": "/c"}, "/s/keys"),
        ("", {"STATE_DIRECTORY": "/s:/t"}, "/s/keys"),
        ("", {"XDG_CONFIG_HOME": "/c"}, "/c/hearth/keys"),
        ("", {}, f"{Path.home()}/.config/hearth/keys"),
    ],
)
def test_where_keys_lie(setting: str, environ: dict[str, str], place: str) -> None:
    assert keys_folder(setting, environ) == Path(place)


def test_what_is_made_is_read_here_and_by_zeromq_s_own_tools(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        add_client(folder, "robot", hand_over=tmp_path / "robot")
    finally:
        os.umask(before)
    keys = read_keys(folder)
    public, secret = zmq.auth.load_certificate(tmp_path / "robot")
    assert keys.clients == {public.decode(): "robot"}
    assert secret is not None
    assert zmq.curve_public(secret) == public
    assert zmq.auth.load_certificate(folder / "clients" / "robot.key") == (public, None)
    assert zmq.auth.load_certificates(folder / "clients") == {public: True}
    own = (keys.public.encode(), keys.secret.encode())
    assert zmq.auth.load_certificate(folder / "server.key_secret") == own
    assert read_key_file(tmp_path / "robot").server == keys.public
    assert keys.secret not in repr(keys)
    paths = [*tmp_path.rglob("*.key*"), tmp_path / "robot"]
    assert len(paths) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder / "clients")]
    assert modes == [0o700, 0o700]


def test_files_of_zeromq_s_own_tools_are_read(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        public, _ = zmq.auth.create_certificates(tmp_path, "arm", {"email": "a@b.c"})
        (folder / "clients").mkdir()
    finally:
        os.umask(before)
    Path(public).rename(folder / "clients" / "arm.key")
    assert list(read_keys(folder).clients.values()) == ["arm"]


@pytest.mark.parametrize(
    ("name", "mode", "right"),
    [
        ("", 0o750, 700),
        ("server.key_secret", 0o640, 600),
        ("clients/robot.key", 0o604, 600),
        ("clients", 0o770, 700),
    ],
)
def test_what_others_may_open_is_refused_with_what_to_type(
    folder: Path, tmp_path: Path, name: str, mode: int, right: int
) -> None:
    add_client(folder, "robot", hand_over=tmp_path / "robot")
    path = folder / name
    path.chmod(mode)
    with pytest.raises(HearthError, match=rf"mode 0{mode:o}.*: chmod {right} {path}") as caught:
        read_keys(folder)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "keys")
    path.chmod(int(str(right), 8))
    read_keys(folder)


def test_a_folder_without_keys_is_refused_with_the_command(tmp_path: Path) -> None:
    place = tmp_path / "k"
    with pytest.raises(HearthError, match=f"no keys in {place}.*hearth keys init --keys {place}"):
        read_keys(place)
    place.mkdir(0o700)
    with pytest.raises(HearthError, match=f"no keys in {place}.*hearth keys init --keys {place}"):
        read_keys(place)


def test_a_file_that_is_no_key_is_refused_by_its_name(folder: Path) -> None:
    secret = folder / "server.key_secret"
    for text, why in (("", "no key of 40"), ('public-key = "short"', "public-key is no key")):
        secret.write_text(text)
        with pytest.raises(HearthError, match=f"{secret} is no key file: .*{why}"):
            read_keys(folder)
    secret.write_bytes((folder / "server.key").read_bytes())
    with pytest.raises(HearthError, match="has no secret key"):
        read_keys(folder)


def test_the_daemon_s_own_pair_is_made_once(folder: Path) -> None:
    public = read_keys(folder).public
    with pytest.raises(HearthError, match="has the daemon's keys already"):
        make_server_keys(folder)
    assert read_keys(folder).public == public


def test_clients_are_listed_once_by_names_that_are_names(folder: Path, tmp_path: Path) -> None:
    public = zmq.curve_keypair()[0].decode()
    add_client(folder, "a.b-c_1", public)
    assert read_keys(folder).clients == {public: "a.b-c_1"}
    for name, key, why in (
        ("a.b-c_1", zmq.curve_keypair()[0].decode(), "is listed already"),
        ("other", public, "listed already, as a.b-c_1"),
        ("../up", public, "no name for a client"),
        (".hidden", public, "no name for a client"),
        ("x" * 65, public, "no name for a client"),
        ("other", "x" * 39, "40 characters"),
    ):
        with pytest.raises(HearthError, match=why):
            add_client(folder, name, key)
    with pytest.raises(HearthError, match="is listed already"):
        add_client(folder, "a.b-c_1", hand_over=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    remove_client(folder, "a.b-c_1")
    assert read_keys(folder).clients == {}
    with pytest.raises(HearthError, match=r"no client a.b-c_1 is listed"):
        remove_client(folder, "a.b-c_1")


def test_nothing_is_written_over_and_nothing_is_left_half_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "robot").write_text("mine")
    with pytest.raises(FileExistsError):
        add_client(folder, "robot", hand_over=tmp_path / "robot")
    assert (tmp_path / "robot").read_text() == "mine"
    assert read_keys(folder).clients == {}

    def full(_folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_make_folder", full)
    with pytest.raises(OSError, match="No space"):
        add_client(folder, "arm", hand_over=tmp_path / "arm")
    assert not (tmp_path / "arm").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_makes_belongs_to_whom_the_folder_around_it_does(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    make_server_keys(tmp_path / "keys")
    add_client(tmp_path / "keys", "robot", zmq.curve_keypair()[0].decode())
    made = [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]
    assert len(made) == 5
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(12345, 12346)}
