"""`hearth bench clients`: what each client costs, beside gRPC."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import click
import msgspec

from hearth.bench.clients.measure import ClientFigures
from hearth.bench.clients.scripted_daemon import scripted_daemon
from hearth.bench.report import Record, note, print_cases, publish, record_option
from hearth.daemon.cli.options import json_option
from hearth.runtime.errors import HearthError

_FOLDER = Path(__file__).resolve().parents[2] / "clients"
_GRPC = "hearth.bench.clients.grpc_peer"
_ASYNCIO = ("python", "grpc")
"""Names of programs that have a form for asyncio too, by `--asyncio`."""
_MISSING = 77
"""Exit code of a program that was not built."""
_TIMEOUT_S = 120.0

Figures = dict[str, ClientFigures | None]


class ClientCase(ClientFigures, kw_only=True):
    """A row of the table; the ratio is that to gRPC's time per delta in the same form."""

    delta_over_grpc: float | None


@click.command()
@click.option("--client", "chosen", multiple=True, metavar="NAME", help="One of them; default all.")
@click.option(
    "--clients",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=_FOLDER,
    metavar="DIR",
    help="Their folder.  [that of the repository]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each, by turns; a figure is their median.",
)
@record_option
@json_option
def clients(
    chosen: Sequence[str], folder: Path, rounds: int, record: Record, *, as_json: bool
) -> None:
    """Time a status, a delta and a picture of 1 MiB by each client, and the memory of a session.

    The daemon is a scripted one that computes nothing; gRPC does the same over a unix socket. A
    client that was not built, or whose peer is missing, is null and named.
    """
    found = {one.parent.name: (str(one),) for one in sorted(folder.glob("*/bench"))}
    if "python" not in found:
        raise click.UsageError(f"{folder} has no clients: --clients names their folder")
    unknown = set(chosen) - set(found)
    if unknown:
        raise click.UsageError(f"no client has the name {min(unknown)}: {', '.join(found)}")
    programs = {name: command for name, command in found.items() if not chosen or name in chosen}
    figures = measure_clients(programs, rounds)
    record.keep({name: one for name, one in figures.items() if one is not None})
    publish(figures, lambda: print_cases(*case_table(figures)), as_json=as_json)


def measure_clients(found: Mapping[str, Sequence[str]], rounds: int) -> Figures:
    """Medians of `rounds` runs of each program; gRPC comes behind them, and `http`, still None."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder, ExitStack() as stack:
        sockets = {"": Path(folder) / "zmq", "grpc": Path(folder) / "grpc"}
        stack.enter_context(scripted_daemon(sockets[""]))
        programs = dict(found)
        if find_spec("grpc") is None:
            note("grpc is skipped: grpcio is not installed (make bench-env)")
        else:
            # What the machine may lack.
            from hearth.bench.clients.grpc_peer import grpc_server  # noqa: PLC0415 - said above

            stack.enter_context(grpc_server(sockets["grpc"]))
            programs["grpc"] = (sys.executable, "-m", _GRPC)
        for name in _ASYNCIO:
            if name in programs:
                programs[f"{name}_asyncio"] = (*programs[name], "--asyncio")
        runs: dict[str, list[ClientFigures]] = {name: [] for name in programs}
        for turn in range(rounds):
            for name, command in programs.items():
                if turn and not runs[name]:
                    continue
                note(f"{name}: round {turn + 1} of {rounds}")
                socket = sockets["grpc" if name.startswith("grpc") else ""]
                one = run_program(name, [*command, str(socket)])
                runs[name] += [one] if one else []
    figures = {name: _medians(of) for name, of in runs.items()}
    # A door over HTTP is not there yet.
    return {**figures, "grpc": figures.get("grpc"), "http": None}


def run_program(name: str, command: Sequence[str]) -> ClientFigures | None:
    """The figures that a program prints, by clients/conformance/BENCH.md; None if not built.

    Raises `internal` when it fails or prints something else.
    """
    # Settings of the user's own daemon are no concern of these.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HEARTH_")}
    try:
        done = subprocess.run(  # noqa: S603 - our own programs
            command,
            env={**environ, "PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise HearthError("internal", f"the bench of {name} did not end in time") from None
    told = done.stderr.decode(errors="replace").strip()
    last = told.splitlines()[-1] if told else "it said nothing"
    if done.returncode == _MISSING:
        note(f"{name} is skipped: {last}")
        return None
    if done.returncode:
        raise HearthError("internal", f"the bench of {name} ended with {done.returncode}: {last}")
    try:
        return msgspec.json.decode(done.stdout, type=ClientFigures)
    except msgspec.MsgspecError as error:
        raise HearthError("internal", f"the bench of {name} printed no figures: {error}") from error


def _medians(runs: Sequence[ClientFigures]) -> ClientFigures | None:
    if not runs:
        return None
    names = ClientFigures.__struct_fields__
    return ClientFigures(**{name: median(getattr(run, name) for run in runs) for name in names})


def case_table(figures: Figures) -> tuple[str, str, dict[str, ClientCase]]:
    """Title, names of the columns and rows of those that were measured."""
    rows = {}
    for name, one in figures.items():
        if one is None:
            continue
        peer = figures.get("grpc_asyncio" if name.endswith("_asyncio") else "grpc")
        ratio = one.delta_us / peer.delta_us if peer else None
        rows[name] = ClientCase(**msgspec.structs.asdict(one), delta_over_grpc=ratio)
    return "Clients of a daemon that computes nothing", " ".join(ClientCase.__struct_fields__), rows
