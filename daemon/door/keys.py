"""The folder of CURVE keys: the daemon's own pair, and a public key for each client on TCP."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq

from hearth.runtime.errors import HearthError
from hearth_client.errors import HearthClientError
from hearth_client.keys import check_private, is_key, read_key_file

_log = structlog.get_logger("hearth")
FILE_MODE = 0o600
FOLDER_MODE = 0o700
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PUBLIC, _SECRET = ".key", ".key_secret"
_SERVER = f"server{_SECRET}"
_CLIENTS = "clients"


@dataclass(frozen=True)
class Keys:
    """The daemon's pair, and the clients' names by their public keys; keys are Z85 texts."""

    public: str
    secret: str = field(repr=False)
    clients: Mapping[str, str]


def keys_folder(setting: str, environ: Mapping[str, str]) -> Path:
    """Folder of the keys: as set, else in the service's state, else in the user's settings."""
    if setting:
        return Path(setting)
    states = environ.get("STATE_DIRECTORY", "")
    if states:
        # A service with several has them joined by colons.
        return Path(states.split(":")[0]) / "keys"
    own = environ.get("XDG_CONFIG_HOME")
    return (Path(own) if own else Path.home() / ".config") / "hearth" / "keys"


def read_keys(folder: Path) -> Keys:
    """All keys of a folder; raises `invalid_value` where they are missing or open to others."""
    try:
        check_private(folder, folder.stat(), FOLDER_MODE)
        own = read_key_file(folder / _SERVER)
        clients = {}
        listed = folder / _CLIENTS
        if listed.exists():
            check_private(listed, listed.stat(), FOLDER_MODE)
            for path in sorted(listed.iterdir()):
                if path.suffix == _PUBLIC:
                    clients[read_key_file(path).public] = path.stem
    except FileNotFoundError:
        raise _missing(folder) from None
    except OSError as error:
        raise _unusable(f"cannot read the keys in {folder}: {error.strerror}") from error
    except HearthClientError as error:
        if not (folder / _SERVER).exists():
            raise _missing(folder) from None
        raise _unusable(error.message) from error
    if not own.secret or "" in clients:
        missing = f"{folder / _SERVER} has no secret key"
        raise _unusable(f"a file below {folder} has no public key" if own.secret else missing)
    return Keys(zmq.curve_public(own.secret.encode()).decode(), own.secret, clients)


def keys_of(tcp_port: int, setting: str, environ: Mapping[str, str]) -> Keys | None:
    """The keys of the TCP socket, where there is one; raises `invalid_value`."""
    if not tcp_port:
        return None
    keys = read_keys(keys_folder(setting, environ))
    if not keys.clients:
        _log.warning("no client's key is listed: `hearth keys add NAME`, then `hearth reload`")
    return keys


def make_server_keys(folder: Path) -> str:
    """Make the folder and the daemon's own pair in it, and return the public key.

    Raises `invalid_value` where there is one: clients know the daemon by it.
    """
    _make_folder(folder)
    if (folder / _SERVER).exists():
        raise _unusable(
            f"{folder} has the daemon's keys already, by which its clients know it: `hearth keys "
            "list` shows the public one; to make others remove the files server.key*"
        )
    public, secret = (key.decode() for key in zmq.curve_keypair())
    _write(folder / _SERVER, public, secret, like=folder)
    _write(folder / f"server{_PUBLIC}", public, like=folder)
    return public


def add_client(folder: Path, name: str, public: str = "", hand_over: Path | None = None) -> None:
    """List a client by its public key, or by that of a pair which goes into the file `hand_over`.

    The file holds the daemon's public key as well. Raises `invalid_value`.
    """
    keys = read_keys(folder)
    path = _client_path(folder, name)
    if path.exists():
        raise _unusable(f"a client {name} is listed already: take another name, or remove it first")
    if hand_over is not None:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        _write(hand_over, public, secret, server=keys.public)
    elif not is_key(public):
        raise _unusable("this is no public key: it has 40 characters, as ZeroMQ's tools print it")
    elif public in keys.clients:
        raise _unusable(f"this key is listed already, as {keys.clients[public]}")
    try:
        _make_folder(path.parent)
        _write(path, public, like=folder)
    except BaseException:
        if hand_over is not None:
            hand_over.unlink()
        raise


def remove_client(folder: Path, name: str) -> None:
    """List a client no longer; raises `invalid_value` where it was not."""
    try:
        _client_path(folder, name).unlink()
    except FileNotFoundError:
        raise _unusable(f"no client {name} is listed in {folder}") from None


def _client_path(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise _unusable(
            f"{name[:64]!r} is no name for a client: letters, digits, '.', '_' and '-', at most 64"
        )
    return folder / _CLIENTS / f"{name}{_PUBLIC}"


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=FOLDER_MODE, parents=True)
        folder.chmod(FOLDER_MODE)
        _give(folder, folder.parent)
    try:
        check_private(folder, folder.stat(), FOLDER_MODE)
    except HearthClientError as error:
        raise _unusable(error.message) from error


def _write(
    path: Path, public: str, secret: str = "", *, server: str = "", like: Path | None = None
) -> None:
    """Write a new file in ZeroMQ's form, that of `zmq.auth.create_certificates`."""
    lines = ["metadata", "curve", f'    public-key = "{public}"']
    if server:
        lines.insert(1, f'    server-key = "{server}"')
    if secret:
        lines.append(f'    secret-key = "{secret}"')
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, FILE_MODE), "w") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write("\n".join(lines) + "\n")
    if like is not None:
        _give(path, like)


def _give(path: Path, like: Path) -> None:
    """Give root's files to the owner of the folder, as the service has to read them."""
    if os.geteuid() == 0:
        status = like.stat()
        os.chown(path, status.st_uid, status.st_gid)


def _missing(folder: Path) -> HearthError:
    return _unusable(
        f"there are no keys in {folder}: make the daemon's by `hearth keys init --keys {folder}`, "
        "and each client's by `hearth keys add NAME` likewise"
    )


def _unusable(message: str) -> HearthError:
    return HearthError("invalid_value", message, "keys")
