"""The listening socket's file: one owner by a lock, private by its mode, never a leftover."""

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hearth.runtime.errors import HearthError
from hearth_client.address import MAX_PATH_BYTES, agreed_path

_FOLDER_MODE = 0o750
_LOCK_MODE = 0o600
_SOCKET_UMASK = 0o117
_BACKLOG = 128
_FIRST_PASSED_FD = 3
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid: struct ucred, unix(7)


class Listener:
    """A bound, listening local socket at `path`; the file is ours while we hold its lock."""

    def __init__(self, path: Path, listening: socket.socket, lock: int | None) -> None:
        self.path = path
        # Also one that the service manager passed.
        listening.setblocking(False)
        self._listening = listening
        self._lock = lock

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable while a connection waits to be accepted."""
        return self._listening.fileno()

    def accept(self) -> socket.socket:
        """Accept the next connection; raises OSError, BlockingIOError where none waits."""
        return self._listening.accept()[0]

    def close(self) -> None:
        """Remove the socket file and give up its lock; a file of the service manager's stays."""
        self._listening.close()
        if self._lock is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._lock)


def open_listener(setting: str, environ: Mapping[str, str]) -> Listener:
    """Listen at `setting`, at the socket that the service manager passed, or at the agreed place.

    Raises `already_running` naming the process that holds the path, or `socket_unusable`.
    """
    passed = _passed_socket(environ)
    try:
        path = _path_of(setting, environ, passed)
    except HearthError:
        if passed is not None:
            passed.close()
        raise
    if passed is not None:
        # Whoever made it sees to it that one daemon has it, maybe in a folder that is not ours.
        return Listener(path, passed, None)
    lock = _take_lock(path)
    try:
        return Listener(path, bind_file(path, _SOCKET_UMASK), lock)
    except HearthError:
        os.close(lock)
        raise


def check_place(setting: str, environ: Mapping[str, str]) -> None:
    """Raise `socket_unusable` for a path that no socket can have, before work is done for it."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        _path_of(setting, environ, None)


def check_free(setting: str, environ: Mapping[str, str]) -> None:
    """Raise `already_running` where another daemon has the path, before work is done for it."""
    if environ.get("LISTEN_PID") == str(os.getpid()):
        return
    path = _path_of(setting, environ, None)
    with suppress(OSError):  # A missing file is free; an unreadable one is reported later.
        lock = os.open(_lock_file(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _held(path, lock) from error
        finally:
            os.close(lock)


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _held(path: Path, lock: int) -> HearthError:
    holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
    return _running(path, f"process {holder}" if holder else "another process")


def _path_of(setting: str, environ: Mapping[str, str], passed: socket.socket | None) -> Path:
    if "://" in setting.removeprefix("ipc://"):
        raise _unusable(f"{setting} is no path: the setting for clients on TCP is tcp_port")
    path = Path(setting.removeprefix("ipc://")) if setting else _own_path(environ)
    if passed is not None:
        given = Path(passed.getsockname())
        if setting and given != path:
            raise _unusable(f"the service manager listens at {given} and not at {path}")
        path = given
    _check_length(path)
    return path


def _check_length(path: Path) -> None:
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise _unusable(
            f"the socket path {path} has {size} bytes, at most {MAX_PATH_BYTES} are possible: "
            "choose a shorter folder"
        )


def _own_path(environ: Mapping[str, str]) -> Path:
    folders = environ.get("RUNTIME_DIRECTORY", "")
    # A service with several runtime folders has them joined by colons.
    return Path(folders.split(":")[0]) / "hearth.sock" if folders else agreed_path(environ)


def _passed_socket(environ: Mapping[str, str]) -> socket.socket | None:
    """The socket of systemd's socket activation, if this process was given one."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if environ.get("LISTEN_FDS") != "1":
        raise _unusable("the service manager must pass exactly one socket")
    try:
        passed = socket.socket(fileno=os.dup(_FIRST_PASSED_FD))
    except OSError as error:
        raise _unusable("the service manager passed no socket") from error
    local = passed.family == socket.AF_UNIX and passed.type == socket.SOCK_STREAM
    listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    # The name of an abstract socket comes as bytes.
    if not local or not listens or not isinstance(passed.getsockname(), str):
        passed.close()
        raise _unusable("the service manager must pass a stream socket that listens at a path")
    return passed


def _take_lock(path: Path) -> int:
    name = _lock_file(path)
    try:
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _LOCK_MODE)
        # Whoever may open it can hold the lock: no other member of the group, also of older files.
        os.fchmod(lock, _LOCK_MODE)
    except OSError as error:
        raise _unusable(
            f"cannot write {name} ({os.strerror(error.errno or 0)}): choose a folder that is yours"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held = _held(path, lock)
        os.close(lock)
        raise held from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise _unusable(f"cannot write {name} ({os.strerror(error.errno or 0)})") from error
    return lock


def bind_file(path: Path, umask: int) -> socket.socket:
    """Listen at `path`, whose mode is what `umask` leaves; no second process may do so meanwhile.

    Raises `socket_unusable`, or `already_running` where another process listens.
    """
    _check_length(path)
    try:
        _remove_leftover(path)
    except OSError as error:
        raise _unusable(f"cannot listen at {path} ({os.strerror(error.errno or 0)})") from error
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # The mode must be right from the first moment: a change after bind leaves a gap.
    before = os.umask(umask)
    try:
        listening.bind(os.fspath(path))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _unusable(f"cannot listen at {path} ({os.strerror(error.errno or 0)})") from error
    finally:
        os.umask(before)
    return listening


def _remove_leftover(path: Path) -> None:
    """Remove a socket file without a listener; the lock must be held."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _unusable(f"{path} exists and is not a socket: remove it or choose another path")
    # The clients' socket may be the service manager's, and the owner's beside it is the daemon's.
    for place in (path.with_name(f"{path.name}.ctl"), path):
        holder = _listening_process(place)
        if holder is not None:
            raise _running(path, f"process {holder}")
    path.unlink(missing_ok=True)


def _listening_process(path: Path) -> int | None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(os.fspath(path)) != 0:
            return None
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return int(CREDENTIALS.unpack(peer)[0])


def _running(path: Path, holder: str) -> HearthError:
    return HearthError(
        "already_running",
        f"{holder} already serves {path}: stop it, or choose another socket",
        "socket",
    )


def _unusable(message: str) -> HearthError:
    return HearthError("socket_unusable", message, "socket")
