import click
import msgspec
from hearth_client.protocol import StatusReport

from daemon.cli.clients import connected
from daemon.cli.console import out, table
from daemon.cli.executor_rows import executor_rows
from daemon.cli.options import json_option, key_option, socket_option
from daemon.life import words


@click.command()
@socket_option
@key_option
@json_option
def status(socket: str | None, key: str | None, *, as_json: bool) -> None:
    """Show what the running daemon serves and does."""
    with connected(socket, key, name="hearth-status", status_only=True) as client:
        report = client.status()
    if as_json:
        fields = msgspec.to_builtins(report)
        click.echo(msgspec.json.encode({k: v for k, v in fields.items() if k not in {"t", "id"}}))
    else:
        out().print(table(_rows(report)))


def _rows(report: StatusReport) -> list[tuple[str, str]]:
    rows = [
        ("server", report.server),
        ("state", words(report.state, report.stage, report.share, report.reason)),
        ("model", report.model),
        ("up", f"{report.uptime_s:.0f} s"),
        ("clients", str(report.clients)),
        ("places", f"{report.running} of {report.places} used"),
        ("requests", f"{report.running} running, {report.queued} queued"),
        ("queued tokens", str(report.queued_tokens)),
    ]
    rows += [("adapters", ", ".join(report.adapters))] if report.adapters else []
    rows += executor_rows(report.executor) if report.executor is not None else []
    rows += [(f"engine {name}", str(value)) for name, value in report.engine.items()]
    rows += [(f"total {name}", str(value)) for name, value in report.totals.items()]
    return rows
