"""How commands reach a running daemon, and how they say that there is none."""

import os
import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager

import click
from hearth_client import Client, resolve_address
from hearth_client.errors import ConnectionTimeout, HearthClientError

from daemon.cli.errors import Failure
from daemon.configuration.load import load_settings

_SCHEME = "ipc://"
_PROBE_S = 1.0
_START_S = 120.0
"""How long a daemon may take until it answers, while it builds its engine for instance."""


def daemon_address(socket: str | None) -> str | None:
    """`socket` when given, else that of the settings; None for the agreed place."""
    return socket or load_settings().socket or None


@contextmanager
def connected(
    socket: str | None, key: str | None = None, *, status_only: bool = False
) -> Iterator[Client]:
    """A client of the daemon; failures become one line that says what to do."""
    with explained():
        address = resolve_address(daemon_address(socket))
        local = address.startswith(_SCHEME)
        if local:
            _probe(address.removeprefix(_SCHEME))
        client = Client(address, status_only=status_only, client_key=key)
        try:
            client.connect()
        except ConnectionTimeout:
            if status_only or not local:
                raise
            # A service manager listens also for a daemon that it only starts now.
            click.echo("no answer yet: waiting for the daemon to start", err=True)
            client = Client(address, timeout=_START_S)
        with client:
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
