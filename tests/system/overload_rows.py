"""The smaller rows of overload: what shares an engine, and who waits for whom."""

import asyncio
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from time import monotonic

import msgspec
import uvloop

from hearth.actors.scheduler.fair_share import FIRST_PLACE_S
from hearth.bench.toy_daemon import connected
from hearth.daemon.configuration.settings import Settings
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
