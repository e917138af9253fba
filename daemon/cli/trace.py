import click
import msgspec

from daemon.cli.clients import daemon_address
from daemon.cli.console import out, show
from daemon.cli.options import json_option, socket_option
from daemon.cli.waterfall import listing, waterfall
from daemon.control.client import ask
from daemon.control.messages import Trace, TraceReport


@click.command()
@click.argument("request_id", default="", metavar="[ID]")
@socket_option
@json_option
def trace(request_id: str, socket: str | None, *, as_json: bool) -> None:
    """Show where a request that has ended spent its time, or list the last 20.

    ID is what `accepted` told the client and what the log has as `request`. The daemon keeps the
    last 1,000; below 80 columns the list has fewer of its own. To be run as the daemon's user or
    root.
    """
    report = ask(Trace(request_id), TraceReport, daemon_address(socket), timeout_s=10)
    if as_json:
        click.echo(msgspec.json.encode(report.requests[0] if request_id else report.requests))
    elif request_id:
        show(waterfall(report.requests[0]))
    else:
        show(listing(report.requests, report.now, out().width))
