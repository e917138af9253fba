import click

from hearth.daemon.cli.clients import daemon_address
from hearth.daemon.cli.options import socket_option
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Metrics, MetricsText

_ANSWER_S = 10.0


@click.command()
@socket_option
@click.option("--openmetrics", is_flag=True, help="In that form instead of Prometheus's own.")
def metrics(socket: str | None, *, openmetrics: bool) -> None:
    """Print what the running daemon counts, as Prometheus would read it.

    It needs the daemon's user or root; docs/metrics.md says what each metric means.
    """
    answer = ask(Metrics(openmetrics), MetricsText, daemon_address(socket), timeout_s=_ANSWER_S)
    click.echo(answer.text, nl=False)
