"""Generations that have ended, as people see them in a terminal."""

import click
import msgspec
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hearth.daemon.cli.clients import daemon_address
from hearth.daemon.cli.console import out, printable_name, show, table
from hearth.daemon.cli.options import json_option, socket_option
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.door.finished import FinishedRequest
from hearth.daemon.observe.tracing.spans import Stage, stages
from hearth.runtime.speculation.policy import accept_length

_COLOURS = {
    "tokenize": "blue",
    "images": "bright_blue",
    "queue": "yellow",
    "prefill": "magenta",
    "decode": "green",
    "detokenize": "cyan",
}
_SLIVERS = 400
_ROOMY = 80
"""Columns from which on a list has all that there is."""


def waterfall(ended: FinishedRequest) -> RenderableType:
    """One request: what it was, and when it was where."""
    told = stages(ended)
    known = sum(stage.seconds for stage in told if stage.name != "detokenize")
    notes = {"tokenize": f"{ended.prompt_tokens} tokens", "detokenize": "in pieces"}
    if ended.decode_s:
        notes["decode"] = f"{(ended.completion_tokens - 1) / ended.decode_s:.0f} tokens/s"
    grid = Table(box=None, show_header=False, pad_edge=False, expand=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    for stage in [*told, Stage("to the end", known, max(0.0, ended.total_s - known))]:
        colour = _COLOURS.get(stage.name, "bright_black")
        # What took no time to speak of is seen as well.
        end = max(stage.end, stage.begin + ended.total_s / _SLIVERS)
        bar = Bar(ended.total_s, stage.begin, min(end, ended.total_s), color=colour)
        grid.add_row(stage.name, bar, milliseconds(stage.seconds), notes.get(stage.name, ""))
    grid.add_row("total", "", milliseconds(ended.total_s), "")
    return Group(table(_rows(ended)), "", grid)


def _rows(ended: FinishedRequest) -> list[tuple[str, str]]:
    known = f" ({ended.cached_tokens} known before)" if ended.cached_tokens else ""
    tokens = f"{ended.prompt_tokens} of prompt{known}, {ended.completion_tokens} of reply"
    rows = [
        ("request", ended.request),
        ("client", printable_name(ended.client)),
        ("reason", ended.reason),
        ("tokens", tokens),
    ]
    if ended.rounds:
        length = accept_length(ended.rounds, ended.accepted_tokens)
        drafted = f"{ended.rounds}, {ended.drafted} tokens drafted, {ended.accepted_tokens} came"
        rows.append(("rounds", f"{drafted} of them, accept length {length:.2f}"))
    if ended.images is not None:
        one = ended.images
        stages_ms = f"{one.decode_ms:g} + {one.resize_ms:g} + {one.engine_ms:g} ms"
        seen = f"{one.count}, {one.tokens} tokens, {one.cached} known before"
        rows.append(("images", f"{seen}; decode + resize + engine {stages_ms}"))
    if ended.ttft_s is not None:
        rows.append(("first token", f"after {milliseconds(ended.ttft_s)}"))
    if ended.traceparent is not None:
        rows.append(("traceparent", ended.traceparent))
    return rows


def listing(requests: list[FinishedRequest], now: float, width: int) -> RenderableType:
    """Requests as a table, the newest last; `now` by the clock of their times."""
    if not requests:
        return Text("no request has ended yet")
    grid = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    grid.add_column("request", style="cyan", no_wrap=True)
    for name in ("ended", "total", "first", "tokens")[: 4 if width >= _ROOMY else 2]:
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("reason", no_wrap=True)
    # The client's own text gets what is left, and is cut first.
    grid.add_column("client", overflow="ellipsis", no_wrap=True, ratio=1)
    for one in requests:
        first = "-" if one.ttft_s is None else milliseconds(one.ttft_s)
        tokens = f"{one.prompt_tokens} + {one.completion_tokens}"
        grid.add_row(
            one.request,
            f"{now - one.opened - one.total_s:.0f} s ago",
            milliseconds(one.total_s),
            *((first, tokens) if width >= _ROOMY else ()),
            Text(one.reason, style="red" if one.failed else ""),
            Text(printable_name(one.client)),
        )
    return grid


def milliseconds(seconds: float) -> str:
    """A time with as many digits as tell something: `0.310 ms`, `25.9 ms`, `1234 ms`."""
    value = seconds * 1000
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0  # noqa: PLR2004 - said above
    return f"{value:.{digits}f} ms"


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
