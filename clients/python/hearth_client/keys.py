"""CURVE keys, in ZeroMQ's own certificate files; what a client needs to come by TCP."""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from hearth_client.address import TCP, resolve_address
from hearth_client.errors import ConnectionFailed

_MOST_BYTES = 64 << 10
_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_LINE = re.compile(r"""^\s*(public|secret|server)-key\s*=\s*["']?([^"'\s]+)""", re.MULTILINE)


class KeyFile(NamedTuple):
    """Keys of a certificate file, as Z85 texts of 40 characters; '' for those it does not have.

    `server` is the public key of the daemon that the file was made for.
    """

    public: str = ""
    secret: str = ""
    server: str = ""


class ClientKeys(NamedTuple):
    """Secret key of a client, and the public key of the daemon that it connects to."""

    secret: str
    server: str


def read_key_file(path: str | os.PathLike[str]) -> KeyFile:
    """The keys of a certificate file; raises ConnectionFailed for one that others may open."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            # The file that is read, whatever the name stands for later.
            check_private(path, os.fstat(file.fileno()), 0o600)
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConnectionFailed(f"cannot read the key file {path}: {error.strerror}") from error
    found = dict(_LINE.findall(text))
    wrong = next((name for name, value in found.items() if not is_key(value)), None)
    if wrong is not None or not found:
        what = f"{wrong}-key is" if wrong else "it has"
        raise ConnectionFailed(f"{path} is no key file: {what} no key of 40 characters")
    return KeyFile(**found)


def check_private(path: Path, status: os.stat_result, mode: int) -> None:
    """Raise ConnectionFailed where the permissions are wider than `mode`."""
    given = stat.S_IMODE(status.st_mode)
    if given & ~mode:
        raise ConnectionFailed(
            f"{path} has mode {given:04o}, which lets others at the keys: chmod {mode:o} {path}"
        )


def is_key(text: str) -> bool:
    """True if the text has the form of a CURVE key, public or secret."""
    return _KEY.fullmatch(text) is not None


def resolve_with_keys(
    address: str | os.PathLike[str] | None,
    client_key: str | os.PathLike[str] | None,
    server_key: str | None,
) -> tuple[str, ClientKeys | None]:
    """The address to connect to, and the keys for it: one by TCP has some, a local one none.

    Raises ConnectionFailed, also where keys are given for a local socket, which asks for none.
    """
    place = resolve_address(address)
    if place.startswith(TCP):
        return place, client_keys(client_key, server_key, os.environ)
    if client_key or server_key:
        raise ConnectionFailed(f"keys are for a daemon at tcp://, and {place} is a local socket")
    return place, None


def client_keys(
    client_key: str | os.PathLike[str] | None,
    server_key: str | None,
    environ: Mapping[str, str],
) -> ClientKeys:
    """The keys given, else those of `$HEARTH_KEY` and `$HEARTH_SERVER_KEY`.

    `client_key` is a file, or the secret key itself. A file of `hearth keys add` names its daemon's
    key too. Raises ConnectionFailed for what is missing or no key.
    """
    given = client_key or environ.get("HEARTH_KEY")
    if not given:
        raise ConnectionFailed(
            "a daemon at tcp:// wants a key: have its owner say `hearth keys add NAME`, and give "
            "the file as client_key (--key), or by $HEARTH_KEY"
        )
    own = isinstance(given, str) and is_key(given) and not Path(given).exists()
    keys = KeyFile(secret=os.fspath(given)) if own else read_key_file(given)
    if not keys.secret:
        raise ConnectionFailed(f"{given} holds no secret key: take the client's own file")
    server = server_key or environ.get("HEARTH_SERVER_KEY") or keys.server
    if not is_key(server):
        raise ConnectionFailed(
            "server_key (or $HEARTH_SERVER_KEY) must be the daemon's public key, 40 characters: "
            "`hearth keys list` shows it"
        )
    return ClientKeys(keys.secret, server)


def secure(socket: "zmq.Socket[bytes]", keys: ClientKeys) -> None:
    """Let a socket that is not connected yet come with these keys, to that daemon alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.secret.encode()))
