import asyncio
import random
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any

import click
import msgspec
import numpy as np
import uvloop

from hearth.actors.scheduler.fair_share import FIRST_PLACE_S
from hearth.bench.arrivals.clients import Seen, Watched, closed_loop, open_loop, watch
from hearth.bench.arrivals.figures import checked
from hearth.bench.arrivals.ideal import Ask
from hearth.bench.child_process import family_usage
from hearth.bench.load_clients import simulated_stream
from hearth.bench.report import Record, note, print_fields, publish, record_option
from hearth.bench.toy_daemon import NO_REUSE, connected, given_or_toy, simulated_flags
from hearth.daemon.cli.errors import FAILED
from hearth.daemon.cli.options import NumberRange, json_option
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.config import load_config
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import AsyncClient, HearthClientError, QueueFull, TooManyRequests
from hearth_client.protocol import Usage

PLACES = 8
ROWS = ("batch_fill", "token_weighted_limit", "priority", "long_and_short_mixed")
_REPLY = 16
_LONG_REPLY = 1900
# 1,500 tokens of the toy engine, which has a token for each letter.
_LONG_PROMPT = "abcd" * 375


_SETTLE_S = 0.5
_PROBES = 20
_REFUSAL_MS = 10.0
_MACHINE_MS = 50.0
"""Milliseconds that a busy machine may add to a wait that is counted in steps."""


class BatchFill(msgspec.Struct, kw_only=True):
    """Rows of a mean step of eight clients in loops, and how long a lone request waits."""

    mean_rows: float
    lone_wait_ms: float
    wait_limit_ms: float

    @property
    def faults(self) -> list[str]:
        """Words for batches that stay empty, or for one that waits for company in vain."""
        slow = self.lone_wait_ms > self.wait_limit_ms + _MACHINE_MS
        return ["batches were not filled"] * (self.mean_rows <= PLACES - 2) + [
            "a lone request waited"
        ] * slow


class TokenLimit(msgspec.Struct, kw_only=True):
    """Requests with long prompts while such wait up to the limit, and short ones beside them.

    `refusal_ms` is the median from sending one to its refusal, `encoding_ms` that of having the
    same text encoded and nothing else.
    """

    long_sent: int
    long_refused: int
    refusal_ms: float
    encoding_ms: float
    queued_tokens: int
    tokens_limit: int
    short_sent: int
    short_accepted: int

    @property
    def faults(self) -> list[str]:
        """Words for a limit that does not hold, or that shuts short ones out."""
        right = (
            self.long_refused == self.long_sent
            and self.refusal_ms <= self.encoding_ms + _REFUSAL_MS
            and self.queued_tokens <= self.tokens_limit
            and self.short_accepted == self.short_sent
        )
        return [] if right else ["the limit of prompt tokens did not do its work"]


class Priority(msgspec.Struct, kw_only=True):
    """Waits of a client of high priority in a flood of low ones, beside a batch's time."""

    high_wait_ms: float
    batch_ms: float
    low_sent: int
    low_served: int

    @property
    def faults(self) -> list[str]:
        """Words for a high priority that waits for over a batch, or low ones that stand still."""
        right = self.high_wait_ms <= self.batch_ms + _MACHINE_MS
        return (
            [] if right and self.low_served == self.low_sent else ["priority did not do its work"]
        )


class LongAndShort(msgspec.Struct, kw_only=True):
    """Waits of short requests beside one of 1,900 tokens, and that for a first place."""

    short_served: int
    short_wait_ms: float
    wait_limit_ms: float
    long_tokens: int

    @property
    def faults(self) -> list[str]:
        """Words for short ones that wait for more than a first place, or a long one that is cut."""
        right = self.short_wait_ms <= self.wait_limit_ms + _MACHINE_MS
        return [] if right and self.long_tokens == _LONG_REPLY else ["a long reply was in the way"]


Row = BatchFill | TokenLimit | Priority | LongAndShort


class Rows:
    """Measures each on the daemon at `socket`, whose steps take `step_s`."""

    def __init__(self, socket: Path, step_s: float) -> None:
        self._socket, self._step_s = socket, step_s
        self._settings = Settings()

    def run(self, name: str) -> Row:
        """The figures of a row by its name."""
        row: Row = uvloop.run(getattr(self, f"_{name}")())
        return row

    async def _batch_fill(self) -> BatchFill:
        ends: Counter[float] = Counter()

        async def loop(client: AsyncClient) -> None:
            for _ in range(10):
                stream = await client.generate(
                    "fill", max_tokens=_REPLY, ignore_eos=True, timestamps=True
                )
                async for delta in stream:
                    ends[delta.ended or 0.0] += len(delta.tokens)

        async with connected(self._socket, PLACES) as clients:
            await asyncio.gather(*(loop(one) for one in clients))
            lone = await _served(clients[0], "lone", _REPLY)
        return BatchFill(
            mean_rows=fmean(ends.values()),
            lone_wait_ms=lone.queue_ms if lone else 0.0,
            wait_limit_ms=self._settings.scheduler.fill_wait_ms,
        )

    async def _token_weighted_limit(self) -> TokenLimit:
        full = PLACES + self._settings.scheduler.queue_tokens // len(_LONG_PROMPT) + 1
        async with connected(self._socket, full + 2) as clients:
            *many, prober, short = clients
            flood = [asyncio.ensure_future(_refusal(one, _LONG_PROMPT, 400)) for one in many]
            await asyncio.sleep(_SETTLE_S)
            report = await short.status()
            encoded, refused = [], []
            for _ in range(_PROBES):
                began = monotonic()
                await prober.tokenize(_LONG_PROMPT)
                encoded.append(monotonic() - began)
                refused.append(await _refusal(prober, _LONG_PROMPT, 1))
            accepted = [await _served(short, "short", 2) for _ in range(2)]
            for one in flood:
                one.cancel()
        seconds = [one for one in refused if one is not None]
        return TokenLimit(
            long_sent=len(refused),
            long_refused=len(seconds),
            refusal_ms=1000 * median(seconds or [0.0]),
            encoding_ms=1000 * median(encoded),
            queued_tokens=report.queued_tokens,
            tokens_limit=self._settings.scheduler.queue_tokens,
            short_sent=len(accepted),
            short_accepted=sum(one is not None for one in accepted),
        )

    async def _priority(self) -> Priority:
        async with connected(self._socket, 5) as clients:
            *low, high = clients
            flood = [
                asyncio.ensure_future(_served(one, "low", _REPLY, priority=-1))
                for one in low
                for _ in range(12)
            ]
            await asyncio.sleep(_REPLY * self._step_s)
            waits = [await _served(high, "high", 2, priority=5) for _ in range(5)]
            served = await asyncio.gather(*flood)
        return Priority(
            high_wait_ms=max(one.queue_ms if one else 0.0 for one in waits),
            batch_ms=1000 * _REPLY * self._step_s,
            low_sent=len(served),
            low_served=sum(one is not None for one in served),
        )

    async def _long_and_short_mixed(self) -> LongAndShort:
        async with connected(self._socket, PLACES + 1) as clients:
            *others, one = clients
            long = asyncio.ensure_future(_served(one, "long", _LONG_REPLY))
            waits: list[Usage] = []

            async def loop(client: AsyncClient) -> None:
                while not long.done():
                    if (usage := await _served(client, "short", _REPLY)) is not None:
                        waits.append(usage)

            await asyncio.gather(*(loop(each) for each in others))
            usage = await long
        return LongAndShort(
            short_served=len(waits),
            short_wait_ms=max(each.queue_ms for each in waits),
            wait_limit_ms=1000 * FIRST_PLACE_S,
            long_tokens=usage.completion_tokens if usage else 0,
        )


async def _served(client: AsyncClient, prompt: str, tokens: int, priority: int = 0) -> Usage | None:
    """Usage of a request; None where it failed."""
    try:
        stream = await client.generate(
            prompt, max_tokens=tokens, ignore_eos=True, priority=priority
        )
        await stream.text()
    except HearthClientError:
        return None
    return stream.done.usage if stream.done else None


async def _refusal(client: AsyncClient, prompt: str, tokens: int) -> float | None:
    """After how many seconds a request was refused for want of room; None where it was not."""
    began = monotonic()
    try:
        stream = await client.generate(prompt, max_tokens=tokens, ignore_eos=True)
        await stream.text()
    except (QueueFull, TooManyRequests):
        return monotonic() - began
    except HearthClientError:
        return None
    return None


TIMES = 3
QUEUE = 64
REFUSAL_MS = 10.0
THROUGHPUT_SHARE = 0.95
REFUSALS = {"queue_full", "too_many_requests"}
_OVERLOAD_REPLY = (8, 24)
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
        return Ask(at, len(letters), self._random.randint(*_OVERLOAD_REPLY), "".join(letters))

    def _truth(self, one: Seen) -> list[int]:
        prompt = self._tokenizer.encode(one.ask.prompt)
        return simulated_stream(self._config, prompt, one.ask.tokens)


def tokens_per_s(watched: Watched, seconds: float) -> float:
    """Tokens a second while requests came, but for the first tenth, in which places fill."""
    begin, end = watched.began + seconds / 10, watched.began + seconds
    within = sum(begin < each <= end for one in watched.seen for each in one.ended)
    return within / (end - begin)
