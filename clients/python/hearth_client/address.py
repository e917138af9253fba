"""Where the daemon's socket lies."""

import os
from collections.abc import Mapping
from pathlib import Path

from hearth_client.errors import ConnectionFailed

MAX_PATH_BYTES = 107
"""What the system allows in the path of a local socket."""
_SCHEME = "ipc://"


def socket_path(environ: Mapping[str, str] | None = None) -> Path:
    """The agreed place: `$HEARTH_SOCKET`, the runtime folder's, the user's, else the system's."""
    environ = os.environ if environ is None else environ
    if environ.get("HEARTH_SOCKET"):
        return Path(environ["HEARTH_SOCKET"].removeprefix(_SCHEME))
    if environ.get("RUNTIME_DIRECTORY"):
        # A service with several runtime folders has them joined by colons.
        return Path(environ["RUNTIME_DIRECTORY"].split(":")[0]) / "hearth.sock"
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "hearth" / "hearth.sock"
    return Path("/run/hearth/hearth.sock")


def resolve_address(
    address: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """The `ipc://` address of a path, else of the agreed place; raises ConnectionFailed."""
    text = os.fspath(address) if address else os.fspath(socket_path(environ))
    path = text.removeprefix(_SCHEME)
    if "://" in path:
        raise ConnectionFailed(f"{text} is not the path of a socket: give a path, or ipc://PATH")
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConnectionFailed(
            f"the socket path {path} has {size} bytes, at most {MAX_PATH_BYTES} are possible: "
            "choose a shorter folder"
        )
    return f"{_SCHEME}{path}"
