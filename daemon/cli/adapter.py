from pathlib import Path

import click
import msgspec
from rich.markup import escape

from hearth.daemon.cli.clients import daemon_address
from hearth.daemon.cli.console import err, out, printable_name, size, table
from hearth.daemon.cli.options import json_option, socket_option
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import (
    AdapterAdded,
    AdapterInfo,
    AdapterList,
    AdapterRemoved,
    AddAdapter,
    ListAdapters,
    RemoveAdapter,
)
from hearth.daemon.shipped_files import ADAPTERS


@click.group()
def adapter() -> None:
    """Add and remove LoRA adapters of a running daemon.

    It needs the daemon's user or root. The engine has to take adapters (hearth export
    --max-lora-rank).
    """


@adapter.command()
@click.argument("name")
@click.argument(
    "folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@socket_option
@json_option
def add(name: str, folder: Path | None, socket: str | None, *, as_json: bool) -> None:
    """Serve the adapter in FOLDER, as PEFT saves it, under NAME.

    Without FOLDER it is the one of that name that ships with Hearth: spoken or careful. It is
    checked and copied to where the daemon keeps adapters, which reads FOLDER itself. Requests may
    ask for it at once, and after every restart.
    """
    source = folder or ADAPTERS.get(name)
    if source is None:
        shipped = " and ".join(ADAPTERS)
        raise click.UsageError(f"name the folder of {name}: {shipped} alone ship with Hearth")
    asked = AddAdapter(name, str(source.absolute()))
    answer = ask(asked, AdapterAdded, daemon_address(socket))
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return
    base = f", for {printable_name(answer.base)}" if answer.base else ""
    click.echo(f"added {answer.name}: rank {answer.rank}, {size(answer.bytes)}{base}")
    if answer.note:
        err().print(f"[yellow]note[/] {escape(printable_name(answer.note))}")


@adapter.command()
@click.argument("name")
@socket_option
@json_option
def remove(name: str, socket: str | None, *, as_json: bool) -> None:
    """Serve NAME no longer: what asked for it and has not ended ends with an error."""
    answer = ask(RemoveAdapter(name), AdapterRemoved, daemon_address(socket))
    click.echo(msgspec.json.encode(answer) if as_json else f"removed {answer.name}")


@adapter.command("list")
@socket_option
@json_option
def list_(socket: str | None, *, as_json: bool) -> None:
    """Show the adapters that the daemon keeps, and whether it serves them."""
    answer = ask(ListAdapters(), AdapterList, daemon_address(socket))
    if as_json:
        click.echo(msgspec.json.encode(answer))
    elif not answer.adapters:
        click.echo(f"there is no adapter in {answer.folder}")
        if not answer.max_rank:
            click.echo("the engine takes none: export the model with --max-lora-rank")
    else:
        out().print(table([(one.name, _status_text(one)) for one in answer.adapters]))


def _status_text(one: AdapterInfo) -> str:
    told = [f"rank {one.rank}", size(one.bytes)] if one.rank else []
    told += [f"for {printable_name(one.base)}"] if one.base else []
    told += [f"not served: {one.problem}"] if one.problem else []
    told += [f"note: {one.note}"] if one.note else []
    return ", ".join(told)
