"""Generations that have ended, as people see them in a terminal."""

from typing import NamedTuple

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from daemon.cli.console import printable, table
from daemon.door.finished import FinishedRequest
from runtime.drafting.metrics import accept_length

_ROOMY = 80
"""Columns from which on a list has all that there is."""


class Stage(NamedTuple):
    """A part of a request's life, in seconds from its arrival."""

    name: str
    begin: float
    seconds: float
    colour: str
    note: str = ""

    @property
    def end(self) -> float:
        """When it was over."""
        return self.begin + self.seconds


def stages(ended: FinishedRequest) -> list[Stage]:
    """What a request went through, in its order; detokenizing lies behind and beside decoding."""
    speed = max(0, ended.completion_tokens - 1) / ended.decode_s if ended.decode_s else 0.0
    told = [
        ("tokenize", ended.tokenize_s, "blue", f"{ended.prompt_tokens} tokens"),
        ("queue", ended.queue_s, "yellow", ""),
        ("prefill", ended.prefill_s, "magenta", ""),
        ("decode", ended.decode_s, "green", f"{speed:.0f} tokens/s" if speed else ""),
    ]
    found: list[Stage] = []
    at = 0.0
    for name, seconds, colour, note in told:
        found.append(Stage(name, at, seconds, colour, note if seconds else ""))
        at += seconds
    found.append(
        Stage("detokenize", max(0.0, at - ended.decode_s), ended.detokenize_s, "cyan", "in pieces")
    )
    return [*found, Stage("to the end", at, max(0.0, ended.total_s - at), "bright_black")]


def waterfall(ended: FinishedRequest) -> RenderableType:
    """One request: what it was, and when it was where."""
    grid = Table(box=None, show_header=False, pad_edge=False, expand=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    for stage in stages(ended):
        if stage.seconds:
            bar = Bar(ended.total_s, stage.begin, min(stage.end, ended.total_s), color=stage.colour)
            grid.add_row(stage.name, bar, milliseconds(stage.seconds), stage.note)
    grid.add_row("total", "", milliseconds(ended.total_s), "")
    return Group(table(_rows(ended)), "", grid)


def _rows(ended: FinishedRequest) -> list[tuple[str, str]]:
    tokens = f"{ended.prompt_tokens} of prompt, {ended.completion_tokens} of reply"
    rows = [
        ("request", ended.request),
        ("client", ended.client),
        ("reason", ended.reason),
        ("tokens", tokens),
    ]
    if ended.rounds:
        length = accept_length(ended.rounds, ended.accepted_tokens)
        drafted = f"{ended.rounds}, {ended.drafted} tokens drafted, {ended.accepted_tokens} came"
        rows.append(("rounds", f"{drafted} of them, accept length {length:.2f}"))
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
            Text(printable(one.client)),
        )
    return grid


def milliseconds(seconds: float) -> str:
    """A time with as many digits as tell something: `0.310 ms`, `25.9 ms`, `1234 ms`."""
    value = seconds * 1000
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0  # noqa: PLR2004 - said above
    return f"{value:.{digits}f} ms"
