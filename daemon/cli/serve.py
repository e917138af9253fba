"""Room for the open files of all clients: ZeroMQ ends its process when a connection finds none.

And the first three, which are no place for others.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import click

from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.errors import report
from hearth.daemon.cli.options import SettingsCommand, settings_from, settings_options
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.door.keys import keys_folder, read_keys
from hearth.daemon.door.listener import check_free, check_place
from hearth.daemon.exit_codes import exit_code
from hearth.daemon.service_state import ServiceState
from hearth.daemon.shipped import Progress, engine_folder, wants_kernels
from hearth.daemon.signals import SignalRequests, held_signals
from hearth.daemon.watchdog import tell_state
from hearth.runtime.errors import HearthError

_OWN_FILES = 128
"""Files that the daemon has open without any client, with a margin for restarts of its actors."""

_STANDARD_ERROR = 2


def fill_standard_files() -> None:
    """Open nothing in place of standard input, output and error where the caller closed them.

    What is opened next would else take their numbers: a log would go into a socket, and uvloop
    aborts the process when it closes one of them.
    """
    # A file gets the lowest number that is free.
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STANDARD_ERROR, "w", closefd=False)


def make_room(clients: int) -> None:
    """Raise this process's limit of open files to the most that the system allows it.

    All connections count, also those that have not said hello, so it is never too high. Raises
    `invalid_value` when not even `clients` connections fit below it.
    """
    limit = _raised_limit()
    if limit != resource.RLIM_INFINITY and limit < clients + _OWN_FILES:
        raise HearthError(
            "invalid_value",
            f"{clients} clients need {clients + _OWN_FILES} open files and the system allows "
            f"{limit}: raise its limit (LimitNOFILE, ulimit -Hn) or serve fewer",
            "clients",
        )


def _raised_limit() -> int:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):
        # The kernel has a bound of its own, which may be below `most` by now.
        return now
    return most


def _refuse_network(_ctx: click.Context, param: click.Parameter, given: str | None) -> None:
    if given is not None:
        raise click.UsageError(
            f"there is no --{param.name}: Hearth listens at a local socket (--socket), and with "
            "--tcp-port at 127.0.0.1 for clients with keys"
        )


@click.command(cls=SettingsCommand)
@settings_options()
@click.option("--host", hidden=True, expose_value=False, callback=_refuse_network)
@click.option("--port", hidden=True, expose_value=False, callback=_refuse_network)
def serve(config: Path | None, **flags: Any) -> int:
    """Run the daemon until it is told to stop.

    Without --engine it serves the model that ships with Hearth, which is exported on first use.
    Every option is also a setting of the file and a variable HEARTH_NAME; a flag wins over the
    variable, the variable over the file.
    """
    fill_standard_files()
    SignalRequests(os.environ).nothing_to_reload()
    try:
        settings = _read(config, flags)
        check_free(settings.door.socket, os.environ)
        with progress_bar() as progress:
            told, kernels = _notifying(progress), wants_kernels(settings)
            folder = engine_folder(settings.engine, told, kernels=kernels)
    except HearthError as error:
        report(error)
        tell_state(ServiceState().failed(error.message))
        return exit_code(error)
    with held_signals() as send_again:
        from hearth.daemon.service import serve as run  # noqa: PLC0415 - the help must not wait for it

        return run(settings, folder, lambda: _read(config, flags), send_again)


def _notifying(progress: Progress) -> Progress:
    """Let the service manager show how the export goes on, too: a hundred times a stage at most."""
    shown = ServiceState()

    def advance(stage: str, done: int, total: int) -> None:
        nonlocal shown
        progress(stage, done, total)
        state = ServiceState("starting", stage, round(done / total, 2) if total else None)
        if state != shown:
            shown = state
            tell_state(state)

    return advance


def _read(config: Path | None, flags: dict[str, Any]) -> Settings:
    settings = settings_from(config, flags)
    check_place(settings.door.socket, os.environ)
    make_room(settings.door.clients)
    if settings.door.tcp_port:
        read_keys(keys_folder(settings.door.keys, os.environ))
    return settings
