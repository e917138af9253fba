"""The command `overload`: three times as much as can be served, and how waiting is shared."""

import asyncio
import random
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import click
import msgspec
import numpy as np
import uvloop

from hearth.bench.arrivals.clients import Seen, Watched, closed_loop, open_loop, watch
from hearth.bench.arrivals.figures import checked
from hearth.bench.arrivals.ideal import Ask
from hearth.bench.child_process import family_usage
from hearth.bench.load_clients import simulated_stream
from hearth.bench.report import Record, note, print_fields, publish, record_option
from hearth.bench.toy_daemon import NO_REUSE, given_or_toy, simulated_flags
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import NumberRange, json_option
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.config import load_config
from hearth.runtime.text import Tokenizer
from hearth_client import AsyncClient
from tests.system.overload_rows import ROWS, Rows

PLACES = 8
TIMES = 3
QUEUE = 64
REFUSAL_MS = 10.0
THROUGHPUT_SHARE = 0.95
REFUSALS = {"queue_full", "too_many_requests"}
_REPLY = (8, 24)
_LONGEST_PROMPT = 60
_CLOSED_CLIENTS = 16
_PATIENT = 4
_LOOK_S = 0.1
_LEAST_S = 0.5
_FLAGS = ("--max-batch", str(PLACES), "--speculation", "off", "--queue-requests", str(QUEUE))


class OverloadFigures(msgspec.Struct, kw_only=True):
    """Outcome of `offered` requests a second where `capacity` can be served.

    `refusal` is from sending a request to its refusal at the client; `hinted` counts those that
    said when to come again, `came_again` those who came then and `taken_again` those of them that
    were taken. `lost_answers` are requests without a terminal answer, `wrong_tokens` what was lost,
    doubled or in another place. `throughput_share` is `tokens_per_s` in parts of what was served
    at capacity. `late_p99_ms` is by how much the clients themselves were late.
    """

    seconds: float
    offered: float
    tokens_per_s: float
    capacity: float = 0.0
    capacity_tokens_per_s: float = 0.0
    throughput_share: float = 0.0
    requests: int
    served: int
    refused: int
    refused_by_code: dict[str, int]
    hinted: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    came_again: int
    taken_again: int
    queue_most: int
    queue_limit: int
    failed: int
    lost_answers: int
    wrong_tokens: int
    rss_growth_mb: float = 0.0
    late_p99_ms: float

    @property
    def faults(self) -> list[str]:
        """Limits that were not kept, in words."""
        found = {
            "answers were lost": self.lost_answers,
            "tokens were wrong": self.wrong_tokens,
            "requests failed": self.failed,
            "the queue was above its limit": self.queue_most > self.queue_limit,
        }
        timed = {
            "refusals were slow": self.refusal_p99_ms > REFUSAL_MS,
            "accepted work was slowed down": self.throughput_share < THROUGHPUT_SHARE,
        }
        if any(timed.values()) and self.late_p99_ms > REFUSAL_MS / 2:
            timed = {"the clients were late themselves: measure again on a quiet machine": True}
        return [what for what, wrong in {**found, **timed}.items() if wrong]


@click.command()
@click.option(
    "--seconds",
    type=NumberRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="X",
    help="Of the overload.",
)
@click.option(
    "--step-ms",
    type=NumberRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="X",
    help="Of the simulated engine.",
)
@click.argument("row", nargs=-1, type=click.Choice(["overload", *ROWS]))
@record_option
@json_option
def overload(
    seconds: float, step_ms: float, row: Sequence[str], record: Record, *, as_json: bool
) -> int:
    """Offer three times what can be served, and see how waiting is shared.

    Without ROW all are measured. The exit code is 1 when an answer or a token was lost, the queue
    grew above its limit, refusals took more than 10 ms at the 99th percentile, or less than 95 % of
    the throughput was left; and where a row of the others is not as it has to be.
    """
    wanted = row or ("overload", *ROWS)
    flags = (*simulated_flags(step_ms), *NO_REUSE, *_FLAGS)
    figures: dict[str, Any] = {}
    faults: list[str] = []
    with given_or_toy() as engine, own_daemon(engine, flags) as daemon:
        if "overload" in wanted:
            figures["overload"] = found = Overload(engine, daemon, seconds).run()
            faults += found.faults
        rows = Rows(daemon.socket, step_ms / 1000)
        for name in (one for one in ROWS if one in wanted):
            note(name)
            figures[name] = measured = rows.run(name)
            faults += measured.faults
        daemon.stop()
    publish(figures, lambda: _show(figures), as_json=as_json)
    record.keep(figures)
    for fault in faults:
        note(fault)
    return FAILED if faults else 0


def _show(figures: dict[str, Any]) -> None:
    for name, one in figures.items():
        print_fields(name, one)


class Overload:
    """Measures capacity, then offers `TIMES` as much for `seconds`."""

    def __init__(self, engine: Path, daemon: OwnDaemon, seconds: float) -> None:
        self._daemon, self._seconds = daemon, seconds
        self._config = load_config(engine)
        self._tokenizer = Tokenizer.open(engine)
        self._random = random.Random(0)
        self._queue_most = 0

    def run(self) -> OverloadFigures:
        """The figures of both."""
        before, capacity = self._calm()
        note(f"{capacity:.1f} requests a second can be served")
        held = family_usage(self._daemon.pid).rss_bytes
        count = max(1, round(TIMES * capacity * self._seconds))
        times = sorted(self._random.uniform(0, self._seconds) for _ in range(count))
        offered = [self._ask(at) for at in times]
        watched, patient, again = uvloop.run(self._overload(offered))
        growth = family_usage(self._daemon.pid).rss_bytes - held
        # Before and after: a machine is not as fast at all times.
        after, _ = self._calm()
        figures = self._figures(watched, patient, again)
        figures.capacity, figures.rss_growth_mb = capacity, growth / 1e6
        figures.capacity_tokens_per_s = (before + after) / 2
        figures.throughput_share = figures.tokens_per_s / figures.capacity_tokens_per_s
        return figures

    def _calm(self) -> tuple[float, float]:
        """Tokens and requests a second where clients ask for one thing after the other."""
        seconds = max(self._seconds / 8, _LEAST_S)
        asks = [self._ask() for _ in range(1000)]
        calm = uvloop.run(closed_loop(self._daemon.socket, asks, _CLOSED_CLIENTS, seconds))
        end = calm.began + seconds
        served = sum(bool(one.reason) and one.ended[-1] <= end for one in calm.seen)
        return tokens_per_s(calm, seconds), served / seconds

    async def _overload(self, asks: list[Ask]) -> tuple[Watched, list[Seen], list[bool]]:
        async with AsyncClient(self._daemon.socket) as looker:
            looking = asyncio.ensure_future(self._look(looker))
            end = monotonic() + self._seconds
            waiting = [asyncio.ensure_future(self._come_as_told(end)) for _ in range(_PATIENT)]
            watched = await open_loop(self._daemon.socket, asks)
            patient = [await one for one in waiting]
            looking.cancel()
        seen = [one for each, _ in patient for one in each]
        return watched, seen, [taken for _, each in patient for taken in each]

    async def _look(self, client: AsyncClient) -> None:
        while True:
            self._queue_most = max(self._queue_most, (await client.status()).queued)
            await asyncio.sleep(_LOOK_S)

    async def _come_as_told(self, end: float) -> tuple[list[Seen], list[bool]]:
        """Ask for one thing after the other, and come again when told to."""
        seen: list[Seen] = []
        again: list[bool] = []
        async with AsyncClient(self._daemon.socket) as client:
            while monotonic() < end:
                told = seen[-1].retry_after_s if seen else None
                await asyncio.sleep(told or 0.0)
                seen.append(await watch(client, self._ask(), monotonic()))
                again += [] if told is None else [bool(seen[-1].reason)]
        return seen, again

    def _figures(self, watched: Watched, patient: list[Seen], again: list[bool]) -> OverloadFigures:
        seen = [*watched.seen, *patient]
        refused = [one for one in seen if one.code in REFUSALS]
        served = [one for one in seen if one.reason]
        truth = checked(served, self._truth)
        milliseconds = [1000 * one.failed_s for one in refused] or [0.0]
        return OverloadFigures(
            seconds=self._seconds,
            offered=len(watched.seen) / self._seconds,
            tokens_per_s=tokens_per_s(Watched(watched.began, served, []), self._seconds),
            requests=len(seen),
            served=len(served),
            refused=len(refused),
            refused_by_code=dict(Counter(one.code for one in refused)),
            hinted=sum(one.retry_after_s is not None for one in refused),
            refusal_p50_ms=float(np.percentile(milliseconds, 50)),
            refusal_p99_ms=float(np.percentile(milliseconds, 99)),
            came_again=len(again),
            taken_again=sum(again),
            queue_most=self._queue_most,
            queue_limit=QUEUE,
            failed=sum(bool(one.code) and one.code not in REFUSALS for one in seen),
            lost_answers=sum(not one.reason and not one.code for one in seen),
            wrong_tokens=truth.lost + truth.doubled + truth.disordered,
            late_p99_ms=1000 * float(np.percentile(watched.late, 99)),
        )

    def _ask(self, at: float = 0.0) -> Ask:
        letters = self._random.choices(
            string.ascii_lowercase, k=self._random.randint(1, _LONGEST_PROMPT)
        )
        return Ask(at, len(letters), self._random.randint(*_REPLY), "".join(letters))

    def _truth(self, one: Seen) -> list[int]:
        prompt = self._tokenizer.encode(one.ask.prompt)
        return simulated_stream(self._config, prompt, one.ask.tokens)


def tokens_per_s(watched: Watched, seconds: float) -> float:
    """Tokens a second while requests came, but for the first tenth, in which places fill."""
    begin, end = watched.began + seconds / 10, watched.began + seconds
    within = sum(begin < each <= end for one in watched.seen for each in one.ended)
    return within / (end - begin)
