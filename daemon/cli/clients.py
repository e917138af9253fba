"""How commands reach a running daemon, and how they say that there is none."""

import os
import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager

from hearth_client import Client, resolve_address
from hearth_client.errors import HearthClientError

from daemon.cli.errors import Failure
from daemon.configuration.settings import load_settings

_SCHEME = "ipc://"
_PROBE_S = 1.0


def daemon_address(socket: str | None) -> str | None:
    """`socket` when given, else that of the settings; None for the agreed place."""
    return socket or load_settings().socket or None


@contextmanager
def connected(socket: str | None, *, status_only: bool = False) -> Iterator[Client]:
    """A client of the daemon; failures become one line that says what to do."""
    with explained():
        address = resolve_address(daemon_address(socket))
        _probe(address.removeprefix(_SCHEME))
        with Client(address, status_only=status_only) as client:
            yield client


@contextmanager
def explained() -> Iterator[None]:
    """Turn the client's exceptions into failures of the command."""
    try:
        yield
    except HearthClientError as error:
        raise Failure(str(error)) from error


def _probe(path: str) -> None:
    """Fail at once where nobody listens; a client would wait for a daemon to come."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except PermissionError:
            return  # the client says who may
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else "no answer"
            raise Failure(
                f"no daemon listens at {path} ({reason}): start one with hearth serve, or name "
                "its socket with --socket"
            ) from error
