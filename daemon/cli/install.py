import os
from pathlib import Path

import click

from hearth.daemon.cli.errors import Failure
from hearth.daemon.cli.options import refuse_without
from hearth.daemon.install import service
from hearth.daemon.install.place import Place

_root_option = click.option(
    "--root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Only the files, in the image of a system below DIR.",
)
_user_option = click.option("--user", is_flag=True, help="A service of this user alone.")


@click.command()
@_root_option
@_user_option
@click.option(
    "--hearth",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="With --root: where the image has the command hearth; default where it is here.",
)
@click.option(
    "--jetson/--no-jetson",
    default=None,
    help="With what a Jetson needs, or without; default is to look for /etc/nv_tegra_release.",
)
def install(root: Path | None, *, user: bool, hearth: Path | None, jetson: bool | None) -> None:
    """Make Hearth a service of systemd, or bring its files up to date.

    The environment that runs this command is the one that serves. Your settings and drop-ins stay
    as they are.
    """
    if root is None:
        refuse_without("images (--root)", {"hearth": hearth})
    if user:
        refuse_without("a service of the system", {"jetson": jetson})
    place = _place(root, user=user)
    laid = service.install(place, hearth, jetson=jetson)
    for path in laid.written:
        click.echo(f"wrote {path}")
    for path in laid.kept:
        click.echo(f"left {path}, which is yours")
    if root is None and not laid.announced:
        whose = "of this user" if user else "of this system"
        alone = "" if user else "; to lay files only, say --root /"
        raise Failure(
            f"the files are in place, but systemd does not run as the service manager {whose}: say "
            f"the same again where it does{alone}"
        )
    click.echo(f"socket: {place.socket}" + ("" if user else ", for members of the group hearth"))
    click.echo(f"next: {laid.next_step}")


@click.command()
@_root_option
@_user_option
@click.option("--purge", is_flag=True, help="Settings, state, cache and the user hearth as well.")
def uninstall(root: Path | None, *, user: bool, purge: bool) -> None:
    """Stop the service and remove its files.

    Settings, state, cache and the user stay without --purge, and files of others always.
    """
    place = _place(root, user=user)
    removed = service.uninstall(place, purge=purge)
    for path in removed:
        click.echo(f"removed {path}")
    if not removed:
        click.echo("there was nothing to remove")
    for path in filter(Path.is_dir, place.kept_data()):
        click.echo(f"left {path}: --purge removes it too")


def _place(root: Path | None, *, user: bool) -> Place:
    return Place(Path.home(), os.environ, root.resolve() if root else None, user)
