import click
import msgspec

from hearth.daemon.cli.clients import daemon_address
from hearth.daemon.cli.options import json_option, socket_option
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Reload, Reloaded


@click.command()
@socket_option
@json_option
def reload(socket: str | None, *, as_json: bool) -> None:
    """Let the running daemon read its settings again, and say what became of them.

    It needs the daemon's user or root. Where the settings are wrong nothing changes.
    """
    answer = ask(Reload(), Reloaded, daemon_address(socket))
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return
    if answer.changed:
        click.echo(f"reloaded: {', '.join(answer.changed)}")
    if answer.needs_restart:
        click.echo(f"takes effect at a restart: {', '.join(answer.needs_restart)}")
    if not answer.changed and not answer.needs_restart:
        click.echo(
            "nothing has changed: a reload reads the settings file, flags and variables stay"
        )
