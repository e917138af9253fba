"""`hearth http`: the command of the distribution hearth-http, where it is installed too."""

import os
import sys
from importlib.util import find_spec

import click

from hearth.daemon.cli.errors import Failure


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def http(arguments: tuple[str, ...]) -> None:
    """Serve OpenAI's and Ollama's API over HTTP, before a running daemon."""
    # By name: the daemon does not know its clients.
    if find_spec("hearth_http") is None:
        raise Failure("hearth-http is not installed here: it is a wheel of its own, clients/http")
    os.execv(sys.executable, [sys.executable, "-m", "hearth_http", *arguments])  # noqa: S606 - our own program
