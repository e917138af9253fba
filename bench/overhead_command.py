import tempfile
from contextlib import closing
from pathlib import Path

import click
import msgspec

from bench.in_process import InProcessLoop
from bench.overhead import (
    PROMPT,
    OverheadFigures,
    arrivals,
    overhead_figures,
    throughputs,
)
from bench.report import note, print_fields, publish
from bench.toy_engine import simulated_flags, toy_engine
from daemon.cli.options import json_option
from daemon.own_daemon import own_daemon

_WARM_UP = 3
_ONE_ROW_TOKENS = 64


class OverheadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured: `requests` of one row, `rounds` of 8 streams."""

    step_ms: float
    requests: int
    rounds: int
    max_tokens: int


@click.command()
@click.option("--step-ms", type=click.FloatRange(0), default=5.0, show_default=True)
@click.option(
    "--requests",
    type=click.IntRange(2),
    default=30,
    show_default=True,
    help="Requests of one row whose tokens are timed.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=7,
    show_default=True,
    help="Repetitions of the throughput measurement.",
)
@click.option("--max-tokens", type=click.IntRange(2, 1024), default=256, show_default=True)
@json_option
def overhead(step_ms: float, requests: int, rounds: int, max_tokens: int, *, as_json: bool) -> None:
    """Time what the daemon adds to each token, to the first one and to 8 streams.

    A real daemon with the simulated engine; the times of its steps and of this process are of
    one monotonic clock.
    """
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder:
        engine = toy_engine(Path(folder))
        with closing(InProcessLoop(engine, step_ms)) as loop:
            plan = OverheadPlan(
                step_ms=step_ms, requests=requests, rounds=rounds, max_tokens=max_tokens
            )
            figures = _measure(engine, loop, plan)
    title = f"Added by the daemon, steps of {step_ms:g} ms"
    publish(figures, lambda: print_fields(title, figures, ".4f"), as_json=as_json)


def _measure(engine: Path, loop: InProcessLoop, plan: OverheadPlan) -> OverheadFigures:
    one_row = min(_ONE_ROW_TOKENS, plan.max_tokens)
    flags = simulated_flags(plan.step_ms)
    with own_daemon(engine, (*flags, "--fill-wait-ms", "0")) as daemon:
        note("one row, no wait to fill a batch")
        arrivals(daemon.socket, _WARM_UP, one_row)
        quick = arrivals(daemon.socket, plan.requests, one_row)
        daemon.stop()
    with own_daemon(engine, flags) as daemon:
        note("one row, default settings")
        arrivals(daemon.socket, _WARM_UP, one_row)
        default = arrivals(daemon.socket, plan.requests, one_row)
        throughput_8 = throughputs(daemon.socket, loop, plan.rounds, plan.max_tokens)
        daemon.stop()
    reference = [loop.first_token_s(PROMPT) for _ in range(plan.requests)]
    return overhead_figures(quick, default, reference, throughput_8)
