from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from hearth.actors.settings import Reloadable
from hearth.daemon.door import curve_socket
from hearth.daemon.door import keys as module
from hearth.daemon.door.curve_socket import (
    CurveSocket,
    Growth,
    check_library,
    memory_of_process,
    open_port,
)
from hearth.daemon.door.keys import (
    Keys,
    add_client,
    keys_folder,
    make_server_keys,
    read_keys,
    remove_client,
)
from hearth.daemon.door.local_socket import STRANGERS
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import Received
from hearth.daemon.door.zap import BURST, ENDPOINT, Zap
from hearth.runtime.errors import HearthError
from hearth_client.keys import read_key_file
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


class Process:
    def __init__(self) -> None:
        self.bytes = 100

    def __call__(self) -> int:
        return self.bytes


def test_growth_counts_and_not_size() -> None:
    process = Process()
    growth = Growth(process)
    process.bytes = 150
    assert not growth.exceeds(50)
    process.bytes = 151
    assert growth.exceeds(50)


def test_what_cannot_be_given_back_counts_no_more() -> None:
    process = Process()
    growth = Growth(process)
    process.bytes = 40
    growth.forgive()
    process.bytes = 151
    assert growth.exceeds(50), "less than at the start is no new start"
    growth.forgive()
    assert not growth.exceeds(50)
    process.bytes = 202
    assert growth.exceeds(50)


def test_no_bound_is_never_exceeded() -> None:
    process = Process()
    growth = Growth(process)
    process.bytes = 1 << 40
    assert not growth.exceeds(0)


def test_memory_that_is_touched_counts() -> None:
    before = memory_of_process()
    # Pages of its own: an allocator that has memory left would not grow.
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (len(block) // mmap.PAGESIZE)
    assert memory_of_process() - before >= len(block) // 2
    block.close()


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


PUBLIC = zmq.curve_keypair()[0].decode()
GOOD = [b"1.0", b"7", b"hearth", b"127.0.0.1", b"", b"CURVE", z85.decode(PUBLIC)]
OTHER = z85.decode(zmq.curve_keypair()[0])


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (GOOD, [b"1.0", b"7", b"200", b"OK", PUBLIC.encode(), b""]),
        ([*GOOD[:6], OTHER], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([*GOOD[:5], b"NULL"], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([*GOOD[:5], b"PLAIN", b"user", b"word"], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([*GOOD[:6], b""], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([b"2.0", *GOOD[1:]], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([b""], [b"1.0", b"", b"400", b"not listed", b"", b""]),
    ],
)
def test_keys_that_are_listed_are_let_in_and_nothing_else(
    asked: list[bytes], answer: list[bytes]
) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        zap = Zap(context)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(ENDPOINT)
        asking.send_multipart(asked)
        assert zap.answer({PUBLIC: "robot"}) == (answer[2] == b"400")
        assert asking.recv_multipart(zmq.NOBLOCK) == answer
        assert zap.answer({PUBLIC: "robot"}) == 0
        zap.close()


def test_a_key_may_open_some_connections_at_once_and_then_one_a_second() -> None:
    now = 100.0
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        zap = Zap(context, lambda: now)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(ENDPOINT)

        def code(key: bytes) -> bytes:
            asking.send_multipart([*GOOD[:6], key])
            zap.answer([PUBLIC, z85.encode(OTHER).decode()])
            return asking.recv_multipart(zmq.NOBLOCK)[2]

        mine = z85.decode(PUBLIC)
        assert {code(mine) for _ in range(BURST)} == {b"200"}
        assert code(mine) == b"300", "it is closed without a word, and may come again"
        assert code(OTHER) == b"200"
        now += 2.0
        assert [code(mine) for _ in range(3)] == [b"200", b"200", b"300"]
        now += 3600.0
        assert [code(mine) for _ in range(BURST + 1)] == [b"200"] * BURST + [b"300"]
        assert zap.admitted == 2 * BURST + 3
        now += BURST
        zap.put_off(PUBLIC)
        zap.put_off(PUBLIC)
        now += BURST
        assert code(mine) == b"300"
        now += 1.0
        assert [code(mine) for _ in range(2)] == [b"200", b"300"]
        zap.close()
