import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from hearth.daemon.cli.options import json_option, settings_from, settings_options
from hearth.daemon.door import keys as store

Command = TypeVar("Command", bound=Callable[..., Any])
_COLUMN = 16


def _in_folder(command: Command) -> Command:
    return settings_options("keys")(command)


def _folder(config: Path | None, keys: str | None) -> Path:
    return store.keys_folder(settings_from(config, {"keys": keys}).door.keys, os.environ)


@click.group()
def keys() -> None:
    """Keep the keys of clients that come by TCP (setting tcp_port)."""


@keys.command()
@_in_folder
def init(config: Path | None, keys: str | None) -> None:
    """Make the daemon's own keys, and print the public one."""
    folder = _folder(config, keys)
    public = store.make_server_keys(folder)
    click.echo(f"made the daemon's keys in {folder}", err=True)
    click.echo(public)


@keys.command()
@click.argument("name")
@click.option("--public", metavar="KEY", help="The public key of a pair made elsewhere.")
@click.option(
    "--out",
    "hand_over",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the client's own keys go; default NAME.key_secret here.",
)
@_in_folder
def add(
    name: str, public: str | None, hand_over: Path | None, config: Path | None, keys: str | None
) -> None:
    """Let a client in by the name NAME, which logs show.

    Its keys are made and written to a file for it, unless --public gives the one of a pair that it
    has already. A running daemon takes the list over at hearth reload.
    """
    if public is not None and hand_over is not None:
        raise click.UsageError("--out is for keys that are made here, without --public")
    folder = _folder(config, keys)
    if public is None:
        hand_over = hand_over or Path(f"{name}.key_secret")
        store.add_client(folder, name, hand_over=hand_over)
        click.echo(f"wrote {hand_over}: hand it to the client alone, it holds its secret key")
    else:
        store.add_client(folder, name, public)
        click.echo(f"listed {name}; the daemon's public key: {store.read_keys(folder).public}")
    click.echo("next: hearth reload, if the daemon runs")


@keys.command("list")
@_in_folder
@json_option
def list_(config: Path | None, keys: str | None, *, as_json: bool) -> None:
    """Show the daemon's public key and those of the clients."""
    known = store.read_keys(_folder(config, keys))
    if as_json:
        names = {name: public for public, name in known.clients.items()}
        click.echo(msgspec.json.encode({"daemon": known.public, "clients": names}))
        return
    clients = sorted((name, public) for public, name in known.clients.items())
    for name, public in [("(daemon)", known.public), *clients]:
        click.echo(f"{name:<{_COLUMN}}  {public}")


@keys.command()
@click.argument("name")
@_in_folder
def remove(name: str, config: Path | None, keys: str | None) -> None:
    """Let a client in no longer; at hearth reload what it has open ends."""
    store.remove_client(_folder(config, keys), name)
    click.echo(f"removed {name}; next: hearth reload, if the daemon runs")
