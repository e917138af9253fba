import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.daemon.door.listener import bind_file, check_free, check_place, open_listener
from hearth.runtime.errors import HearthError


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hl") as name:
        yield Path(name)


def refused(setting: Path, environ: dict[str, str] | None = None) -> HearthError:
    with pytest.raises(HearthError) as caught:
        open_listener(str(setting), environ or {})
    assert caught.value.field == "socket"
    return caught.value


def test_the_socket_is_private_and_goes_with_the_listener(folder: Path) -> None:
    before = os.umask(0o022)
    try:
        listener = open_listener(str(folder / "new" / "h.sock"), {})
        assert os.umask(0o022) == 0o022, "the umask is put back"
    finally:
        os.umask(before)
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o660
    assert stat.S_IMODE(listener.path.parent.stat().st_mode) == 0o750
    lock = listener.path.with_name("h.sock.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600, "who can open a lock can hold it"
    listener.close()
    assert not listener.path.exists()
    open_listener(str(listener.path), {}).close()


def test_a_leftover_is_removed_only_when_nobody_holds_the_path(folder: Path) -> None:
    path = folder / "h.sock"
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(path))
    listener = open_listener(str(path), {})
    error = refused(path)
    assert error.code == "already_running"
    assert f"process {os.getpid()} already serves {path}" in error.message
    assert path.exists()
    with pytest.raises(HearthError, match=f"process {os.getpid()} already serves"):
        check_free(str(path), {})
    listener.close()
    check_free(str(path), {})
    check_free(str(folder / "never" / "h.sock"), {})


def test_a_leftover_beside_which_no_control_socket_can_be_is_removed(folder: Path) -> None:
    path = folder / ("s" * (105 - len(str(folder)) - 1))
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(path))
    open_listener(str(path), {}).close()


def test_a_folder_that_lets_nobody_look_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_path: Path) -> None:
        raise PermissionError(errno.EACCES, "said in words of the system")

    monkeypatch.setattr(Path, "lstat", closed)
    with pytest.raises(HearthError, match="Permission denied") as caught:
        bind_file(folder / "h.sock.ctl", 0o177)
    assert caught.value.code == "socket_unusable"


def test_a_listening_socket_without_lock_is_left_alone(folder: Path) -> None:
    path = folder / "h.sock"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        error = refused(path)
        assert error.code == "already_running"
        assert f"process {os.getpid()} already serves {path}" in error.message
        assert path.exists()


def test_the_daemon_is_named_where_the_service_manager_listens(folder: Path) -> None:
    path = folder / "h.sock"
    # Who listens is who called listen(), and not who has the socket now.
    daemon = (
        "import os, socket, sys\n"
        "own = socket.socket(socket.AF_UNIX); own.bind(sys.argv[1]); own.listen()\n"
        "print(os.getpid(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", daemon, f"{path}.ctl"]
    with (
        socket.socket(socket.AF_UNIX) as passed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        passed.bind(str(path))
        passed.listen()
        assert other.stdout
        assert int(other.stdout.readline()) == other.pid
        assert f"process {other.pid} already serves {path}" in refused(path).message


def test_places_that_cannot_be_used(folder: Path) -> None:
    (folder / "file").write_text("mine")
    assert "is not a socket" in refused(folder / "file").message
    assert (folder / "file").read_text() == "mine"
    assert "cannot write" in refused(folder / "file" / "h.sock").message
    assert "at most 107" in refused(folder / ("x" * 100)).message
    (folder / "link.lock").symlink_to(folder / "target")
    assert refused(folder / "link").code == "socket_unusable"
    assert not (folder / "target").exists()


def test_the_agreed_place_serves_when_none_is_set(folder: Path) -> None:
    environ = {"RUNTIME_DIRECTORY": f"{folder}:/run/two", "XDG_RUNTIME_DIR": "/run/user/1"}
    listener = open_listener("", environ)
    assert listener.path == folder / "hearth.sock"
    listener.close()


ACTIVATED = """
import os, socket, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
listening = socket.socket(socket.AF_UNIX)
abstract = sys.argv[3] == "abstract"
listening.bind("\\0" * abstract + sys.argv[1])
if sys.argv[3] != "connected":
    listening.listen()
os.dup2(listening.fileno(), 3)
from hearth.daemon.door.listener import check_place, open_listener
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2" if sys.argv[3] == "2" else "1"}
listener = open_listener("", environ)
print(listener.path)
listener.descriptor
listener.close()
print(os.path.exists(sys.argv[1]))
"""


def activated(path: Path, descriptors: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: here descriptor 3 belongs to somebody else.
    arguments = [str(path), os.pathsep.join(sys.path), descriptors]
    return subprocess.run(  # the command is our own
        [sys.executable, "-c", ACTIVATED, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_passed_socket_is_used_and_kept(folder: Path) -> None:
    run = activated(folder / "a.sock", "1")
    assert run.stdout.split() == [str(folder / "a.sock"), "True"], run.stderr
    assert [path.name for path in folder.iterdir()] == ["a.sock"], "its folder may be another's"


def test_more_than_one_passed_socket_is_refused(folder: Path) -> None:
    run = activated(folder / "a.sock", "2")
    assert "must pass exactly one socket" in run.stderr


@pytest.mark.parametrize("kind", ["abstract", "connected"])
def test_a_passed_socket_that_cannot_serve_is_refused(folder: Path, kind: str) -> None:
    run = activated(folder / "a.sock", kind)
    assert "must pass a stream socket that listens at a path" in run.stderr


def test_sockets_passed_to_another_process_are_not_ours(folder: Path) -> None:
    listener = open_listener(str(folder / "h.sock"), {"LISTEN_PID": "1", "LISTEN_FDS": "1"})
    assert listener.path == folder / "h.sock"
    listener.close()


def test_a_full_disk_is_told_with_the_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_unused: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    path = folder / "s"
    with pytest.raises(HearthError, match=rf"cannot write {path}\.lock \(No space left") as caught:
        open_listener(str(path), {})
    assert caught.value.code == "socket_unusable"
    assert not path.exists()


def test_a_disk_that_has_no_room_for_the_socket_is_told_with_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(socket.socket, "bind", full)
    path = folder / "s"
    with pytest.raises(HearthError, match=rf"cannot listen at {path} \(No space left") as caught:
        open_listener(str(path), {})
    assert caught.value.code == "socket_unusable"


def test_a_place_that_no_socket_can_have_is_refused_before_any_work(folder: Path) -> None:
    check_place(str(folder / "s"), {})
    longest = str(folder / "s").ljust(107, "s")
    check_place(f"ipc://{longest}", {})
    with pytest.raises(HearthError, match="at most 107 are possible") as caught:
        check_place(str(folder / ("x" * 110)), {})
    assert caught.value.code == "socket_unusable"
    check_place("", {"LISTEN_PID": str(os.getpid()), "XDG_RUNTIME_DIR": "/" + "x" * 110})
