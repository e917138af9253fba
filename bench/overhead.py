"""What the daemon adds, seen from a client in another process."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import msgspec
import uvloop
from hearth_client import AsyncClient, Client

from bench.connections import connected
from bench.in_process import InProcessLoop
from bench.report import note

PROMPT = "switch the light in the kitchen on and tell me the temperature of the living room"
STREAMS = 8


class Arrivals(msgspec.Struct, kw_only=True):
    """Seconds, measured at a client with one row at a time.

    `tokens`: from the end of a decode step in the executor to the receipt of its token. `first`:
    from the end of prefill to the receipt of the first token. `ttft`: from the request to that.
    """

    tokens: list[float] = []
    first: list[float] = []
    ttft: list[float] = []


class OverheadFigures(msgspec.Struct, kw_only=True):
    """Medians in milliseconds, the loss as a share of the in-process throughput at 8 streams.

    `ttft_added_ms` is the client's time to first token less that of the in-process loop
    (tokenization and prefill), without the wait to fill a batch, which is a choice;
    `ttft_added_default_ms` has the daemon's default wait in it. `first_token_added_ms` is the
    way back alone: from the end of prefill to the client.
    """

    ttft_added_ms: float
    token_added_ms: float
    throughput_loss_8: float
    token_added_p99_ms: float
    first_token_added_ms: float
    ttft_added_default_ms: float
    tokens_per_s_8: float
    in_process_tokens_per_s_8: float


def arrivals(socket: Path, requests: int, max_tokens: int) -> Arrivals:
    """Send `requests` requests one after the other and time every token."""
    seen = Arrivals()
    with Client(socket) as client:
        for _ in range(requests):
            _one(client, max_tokens, seen)
    return seen


def throughput(socket: Path, max_tokens: int) -> float:
    """Tokens a second of 8 clients at once, from the first request to the last token."""
    return uvloop.run(_throughput(socket, max_tokens))


def throughputs(
    socket: Path, loop: InProcessLoop, rounds: int, max_tokens: int
) -> tuple[float, float]:
    """Median throughput at 8 streams of the daemon and of the in-process loop, taking turns."""
    daemon: list[float] = []
    in_process: list[float] = []
    for turn in range(rounds):
        note(f"throughput: round {turn + 1} of {rounds}")
        daemon.append(throughput(socket, max_tokens))
        in_process.append(loop.tokens_per_s([PROMPT] * STREAMS, max_tokens))
    return median(daemon), median(in_process)


def overhead_figures(
    quick: Arrivals,
    default: Arrivals,
    in_process_ttft: Sequence[float],
    throughput_8: tuple[float, float],
) -> OverheadFigures:
    """Put the figures together; `quick` is without the wait to fill a batch."""
    daemon, in_process = throughput_8
    reference = median(in_process_ttft)
    return OverheadFigures(
        ttft_added_ms=1000 * (median(quick.ttft) - reference),
        token_added_ms=1000 * median(quick.tokens),
        throughput_loss_8=1 - daemon / in_process,
        token_added_p99_ms=1000 * quantiles(quick.tokens, n=100)[-1],
        first_token_added_ms=1000 * median(quick.first),
        ttft_added_default_ms=1000 * (median(default.ttft) - reference),
        tokens_per_s_8=daemon,
        in_process_tokens_per_s_8=in_process,
    )


def _one(client: Client, max_tokens: int, seen: Arrivals) -> None:
    sent = time.monotonic()
    stream = client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, timestamps=True)
    for delta in stream:
        now = time.monotonic()
        if delta.ended is None:
            continue
        if delta.seq == 0:
            seen.ttft.append(now - sent)
            seen.first.append(now - delta.ended)
        else:
            seen.tokens.append(now - delta.ended)


async def _throughput(socket: Path, max_tokens: int) -> float:
    async with connected(socket, STREAMS) as clients:
        started = time.monotonic()
        counts = await asyncio.gather(*(_drain(client, max_tokens) for client in clients))
        return sum(counts) / (time.monotonic() - started)


async def _drain(client: AsyncClient, max_tokens: int) -> int:
    stream = await client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True)
    await stream.text()
    return len(stream.tokens)
