"""Address of the daemon's socket."""

import grp
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hearth_client.errors import ConnectionFailed, NotAllowed

MAX_PATH_BYTES = 107
"""Most bytes that the system allows in the path of a local socket."""
SYSTEM_PATH = Path("/run/hearth/hearth.sock")
TCP = "tcp://"
_SCHEME = "ipc://"
_PLACE = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")


def socket_path(environ: Mapping[str, str] | None = None) -> Path:
    """`$HEARTH_SOCKET`, else the first agreed place with a socket: the user's, the system's.

    Where there is none yet, a daemon of the user's own is expected.
    """
    environ = os.environ if environ is None else environ
    if environ.get("HEARTH_SOCKET"):
        return Path(environ["HEARTH_SOCKET"].removeprefix(_SCHEME))
    own = agreed_path(environ)
    return own if _may_exist(own) or not _may_exist(SYSTEM_PATH) else SYSTEM_PATH


def agreed_path(environ: Mapping[str, str]) -> Path:
    """Path of a user's own daemon, or of the system's where users have no runtime folder."""
    folder = environ.get("XDG_RUNTIME_DIR")
    return Path(folder) / "hearth" / "hearth.sock" if folder else SYSTEM_PATH


def resolve_address(
    address: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """The `ipc://` address of a path, else of the agreed place; raises ConnectionFailed.

    `tcp://HOST:PORT` stays what it is, also in `$HEARTH_SOCKET`.
    """
    environ = os.environ if environ is None else environ
    named = os.fspath(address) if address else environ.get("HEARTH_SOCKET", "")
    if named.startswith(TCP):
        if not _PLACE.fullmatch(named):
            raise ConnectionFailed(f"{named} has no host and port: give tcp://127.0.0.1:PORT")
        return named
    text = os.fspath(address) if address else os.fspath(socket_path(environ))
    path = text.removeprefix(_SCHEME)
    if "://" in path:
        raise ConnectionFailed(
            f"{text} is not the path of a socket: give a path, ipc://PATH or tcp://HOST:PORT"
        )
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConnectionFailed(
            f"the socket path {path} has {size} bytes, at most {MAX_PATH_BYTES} are possible: "
            "choose a shorter folder"
        )
    return f"{_SCHEME}{path}"


def check_access(address: str) -> None:
    """Raise NotAllowed for a socket that this user may not open; ZeroMQ would try for ever."""
    path = Path(address.removeprefix(_SCHEME))
    if address.startswith(_SCHEME) and _may_exist(path) and not os.access(path, os.W_OK):
        raise NotAllowed(f"not allowed to use {path}: join the group {_group_of(path)}")


def absence(address: str) -> str:
    """Reason why no daemon listens at a local address; "" where one may, a busy one for example."""
    if address.startswith(_SCHEME):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(address.removeprefix(_SCHEME))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                return error.strerror or str(error)
            except OSError:
                return ""
    return ""


def _may_exist(path: Path) -> bool:
    """True if the path exists, or may exist in a folder that this user cannot read."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _group_of(path: Path) -> str:
    for place in (path, path.parent):
        with suppress(OSError, KeyError):
            return grp.getgrgid(place.stat().st_gid).gr_name
    return "that owns it"
