"""The command `soak`: the memory of a daemon whose clients never rest."""

import asyncio
import random
import string
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import msgspec
import numpy as np
import uvloop

from hearth.bench.child_process import family_usage
from hearth.bench.report import Record, note, print_fields, publish, record_option
from hearth.bench.toy_daemon import connected, engine_option, given_or_toy, simulated_flags
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import NumberRange, json_option
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Top, TopReport
from hearth.daemon.own_daemon import own_daemon
from hearth_client import AsyncClient, HearthClientError

ABORT_SHARE = 0.2
_CLIENTS = 8
_WORDS = 500
_LONGEST_WORD = 10
_LONGEST_PROMPT = 80
_LONGEST_REPLY = 128
_FEWEST_SAMPLES = 180
_PAUSE_S = 0.1
_TIDY_S = 10.0
_SAMPLES_PER_NOTE = 6
_STEP_MS = 1.0
CACHE_BYTES = 4 << 20
"""Of the prefix cache: a small one is full within the first fifth of a short run."""
WARM_UP_SHARE = 0.2
"""The first fifth of a run fills pools and caches and is not judged."""
MB_PER_10000_REQUESTS = 1.0
_HANDLES_SLACK = 2
_ENOUGH_SAMPLES = 5


class Sample(msgspec.Struct, frozen=True):
    """The daemon and its executor at one moment."""

    seconds: float
    requests: int
    rss_bytes: int
    handles: int


class SoakFigures(msgspec.Struct, kw_only=True):
    """Growth after the warm-up; slopes by least squares, megabytes of 10^6 bytes.

    `left` counts what the daemon still had open when all its clients had gone.
    """

    requests: int
    aborted: int
    failed: int
    minutes: float
    rss_mb: float
    mb_per_minute: float
    mb_per_10000_requests: float
    handles: int
    handles_growth: float
    left: int
    flat: bool


@click.command()
@click.option("--seconds", type=NumberRange(0.5), default=1800.0, show_default=True, metavar="X")
@click.option(
    "--step-ms",
    type=NumberRange(0, 60_000),
    help=f"Milliseconds a step of the simulated engine.  [{_STEP_MS:g}]",
)
@click.option(
    "--prefix-cache-bytes",
    type=click.IntRange(0),
    default=CACHE_BYTES,
    show_default=True,
    metavar="N",
    help="Of the daemon; it has to be full within the first fifth of the run.",
)
@engine_option("the simulated engine")
@record_option
@json_option
def soak(
    seconds: float,
    step_ms: float | None,
    prefix_cache_bytes: int,
    engine: Path | None,
    record: Record,
    *,
    as_json: bool,
) -> int:
    """Watch the memory of daemon and executor under random requests, a fifth of them cancelled.

    Flat means less than 1 MB per 10,000 requests and no more open handles after the first fifth
    of the run, and at its end nothing that the daemon still remembers of a request or a client.
    The exit code is 1 when it is not.
    """
    if engine and step_ms is not None:
        raise click.UsageError("--step-ms is for the simulated engine alone")
    flags = () if engine else simulated_flags(_STEP_MS if step_ms is None else step_ms)
    flags = (*flags, "--prefix-cache-bytes", str(prefix_cache_bytes))
    with given_or_toy(engine) as folder, own_daemon(folder, flags) as daemon:
        run = Soak(daemon.socket, daemon.pid, seconds)
        uvloop.run(run.run())
        left = remembered(daemon.socket)
        daemon.stop()
    figures = judge(run.samples, aborted=run.aborted, failed=run.failed, left=left)
    title = "Memory of daemon and executor"
    publish(figures, lambda: print_fields(title, figures), as_json=as_json)
    record.keep({"soak": figures})
    return 0 if figures.flat else FAILED


class Soak:
    """Loads the daemon at `socket` for `seconds` and samples the processes under `pid`."""

    def __init__(self, socket: Path, pid: int, seconds: float) -> None:
        self.requests = self.aborted = self.failed = 0
        self.samples: list[Sample] = []
        self._socket = socket
        self._pid = pid
        self._seconds = seconds
        self._random = random.Random(0)
        # A tokenizer remembers thousands of words: a language has an end, so that it fills soon.
        self._words = [self._word() for _ in range(_WORDS)]
        self._started = time.monotonic()

    async def run(self) -> None:
        """Connect and run to the end; there is at least one sample."""
        async with connected(self._socket, _CLIENTS) as clients:
            self._started = time.monotonic()
            await asyncio.gather(self._sample(), *(self._use(client) for client in clients))

    async def _sample(self) -> None:
        while self._elapsed() < self._seconds:
            await asyncio.sleep(self._seconds / _FEWEST_SAMPLES)
            usage = family_usage(self._pid)
            now = Sample(self._elapsed(), self.requests, usage.rss_bytes, usage.handles)
            self.samples.append(now)
            if len(self.samples) % _SAMPLES_PER_NOTE == 0:
                note(
                    f"{now.seconds / 60:.1f} min: {now.requests} requests, "
                    f"{now.rss_bytes / 1e6:.1f} MB, {now.handles} handles"
                )

    async def _use(self, client: AsyncClient) -> None:
        while self._elapsed() < self._seconds:
            try:
                await self._request(client)
            except HearthClientError:
                self.failed += 1
                await asyncio.sleep(_PAUSE_S)
            self.requests += 1

    async def _request(self, client: AsyncClient) -> None:
        draw = self._random
        prompt = " ".join(draw.choices(self._words, k=draw.randint(1, _LONGEST_PROMPT)))
        reply = draw.randint(1, _LONGEST_REPLY)
        breaks_off = draw.randrange(reply) if draw.random() < ABORT_SHARE else None
        stream = await client.generate(prompt, max_tokens=reply, ignore_eos=True)
        if breaks_off == 0:
            stream.cancel()
        async for delta in stream:
            if breaks_off is not None and delta.seq + 1 == breaks_off:
                stream.cancel()
        self.aborted += stream.done is not None and stream.done.reason == "cancelled"

    def _word(self) -> str:
        length = self._random.randint(1, _LONGEST_WORD)
        return "".join(self._random.choices(string.ascii_lowercase, k=length))

    def _elapsed(self) -> float:
        return time.monotonic() - self._started


def remembered(socket: Path) -> int:
    """Count clients and requests in the daemon's tables, once it has had time to tidy."""
    deadline = time.monotonic() + _TIDY_S
    while True:
        top = ask(Top(), TopReport, str(socket))
        left = len(top.clients) + top.open + top.running + top.queued + top.queued_tokens
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_S)


def judge(
    samples: Sequence[Sample], *, aborted: int = 0, failed: int = 0, left: int = 0
) -> SoakFigures:
    """Flat means: no failure, growth below 1 MB per 10,000 requests, no handles left open.

    Handles are compared as medians of the first and the last third after the warm-up, with a
    slack of two. Fewer than five samples after the warm-up are not flat; there is at least one.
    """
    last = samples[-1]
    judged = [one for one in samples if one.seconds >= WARM_UP_SHARE * last.seconds]
    rss = [one.rss_bytes / 1e6 for one in judged]
    per_request = _slope([one.requests for one in judged], rss)
    third = max(1, len(judged) // 3)
    growth = median(one.handles for one in judged[-third:]) - median(
        one.handles for one in judged[:third]
    )
    calm = 10_000 * per_request < MB_PER_10000_REQUESTS and growth <= _HANDLES_SLACK
    return SoakFigures(
        requests=last.requests,
        aborted=aborted,
        failed=failed,
        minutes=last.seconds / 60,
        rss_mb=last.rss_bytes / 1e6,
        mb_per_minute=60 * _slope([one.seconds for one in judged], rss),
        mb_per_10000_requests=10_000 * per_request,
        handles=last.handles,
        handles_growth=growth,
        left=left,
        flat=calm and not failed and not left and len(judged) >= _ENOUGH_SAMPLES,
    )


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    spread = np.asarray(x, dtype=float) - np.mean(x)
    square = float(spread @ spread)
    return float(spread @ np.asarray(y)) / square if square else 0.0
