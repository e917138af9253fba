"""Connections of commands to a running daemon, and their message where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from hearth.daemon.cli.errors import Failure
from hearth.daemon.configuration.load import load_settings
from hearth_client import FEATURES, Client, resolve_address
from hearth_client.address import absence
from hearth_client.errors import ConnectionRefused, ConnectionTimeout, HearthClientError

_SCHEME = "ipc://"
_FEATURES = (*FEATURES, "generation_defaults")
_START_S = 120.0
"""Seconds until a starting daemon answers, while it builds its engine for instance."""


def daemon_address(socket: str | None) -> str | None:
    """`socket` when given, else that of the settings; None for the agreed place."""
    return socket or load_settings().door.socket or None


@contextmanager
def connected(
    socket: str | None,
    key: str | None = None,
    *,
    name: str = "hearth-cli",
    status_only: bool = False,
    wait: bool = False,
) -> Iterator[Client]:
    """A client of the daemon by that name; failures become one line that says what to do.

    With `wait` a daemon that is not started yet is waited for.
    """
    with explained():
        address = resolve_address(daemon_address(socket))
        client = Client(
            address, name=name, status_only=status_only, client_key=key, features=_FEATURES
        )
        try:
            client.connect()
        except ConnectionRefused as error:
            path = address.removeprefix(_SCHEME)
            absent = f"no daemon listens at {path} ({absence(address) or 'it has gone'})"
            if not wait:
                what = "start one with hearth serve, or name its socket with --socket"
                raise Failure(f"{absent}: {what}") from error
            click.echo(f"{absent}: waiting for hearth serve, Ctrl-C leaves", err=True)
            client = Client(address, name=name, timeout=_START_S, features=_FEATURES)
        except ConnectionTimeout:
            if status_only or not address.startswith(_SCHEME):
                raise
            # A service manager listens also for a daemon that it only starts now.
            click.echo("no answer yet: waiting for the daemon to start", err=True)
            client = Client(address, name=name, timeout=_START_S, features=_FEATURES)
        with client:
            yield client


@contextmanager
def explained() -> Iterator[None]:
    """Turn the client's exceptions into failures of the command."""
    try:
        yield
    except HearthClientError as error:
        raise Failure(str(error)) from error
