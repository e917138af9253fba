"""`hearth bench overhead`: what the daemon adds, seen from a client in another process."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles
from time import monotonic

import click
import msgspec
import uvloop

from hearth.bench.batches import rows_of
from hearth.bench.report import note, print_fields, publish
from hearth.bench.toy_daemon import NO_REUSE, connected, given_or_toy, simulated_flags
from hearth.daemon.cli.options import NumberRange, json_option
from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import AsyncClient, Client

PROMPT = "switch the light in the kitchen on and tell me the temperature of the living room"
STREAMS = 8
_WARM_UP = 3
_ONE_ROW_TOKENS = 64


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


@click.command()
@click.option("--step-ms", type=NumberRange(0, 60_000), default=5.0, show_default=True)
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
    with given_or_toy() as engine, closing(InProcessLoop(engine, step_ms)) as loop:
        one_row = min(_ONE_ROW_TOKENS, max_tokens)
        flags = (*simulated_flags(step_ms), *NO_REUSE)
        with own_daemon(engine, (*flags, "--fill-wait-ms", "0")) as daemon:
            note("one row, no wait to fill a batch")
            quick = arrivals(daemon.socket, requests, one_row)
            daemon.stop()
        with own_daemon(engine, flags) as daemon:
            note("one row, default settings")
            default = arrivals(daemon.socket, requests, one_row)
            throughput_8 = throughputs(daemon.socket, loop, rounds, max_tokens)
            daemon.stop()
        reference = [loop.first_token_s(PROMPT) for _ in range(requests)]
    figures = overhead_figures(quick, default, reference, throughput_8)
    title = f"Added by the daemon, steps of {step_ms:g} ms"
    publish(figures, lambda: print_fields(title, figures), as_json=as_json)


class InProcessLoop:
    """Tokenizer and runtime in this process, with a simulated engine of `step_ms` a step."""

    def __init__(self, engine: Path, step_ms: float) -> None:
        options = RuntimeOptions(engine_kind="simulated", step_ms=step_ms)
        self._runtime = LLMInferenceRuntime.open(engine, options)
        self._tokenizer = Tokenizer.open(engine)

    def first_token_s(self, prompt: str) -> float:
        """Seconds from the text to the end of prefill, tokenization included."""
        started = monotonic()
        (row,) = self._begin([prompt], max_tokens=2)
        ended = self._runtime.step().ended
        self._runtime.leave(row)
        return ended - started

    def tokens_per_s(self, prompts: list[str], max_tokens: int) -> float:
        """Throughput of one batch from its texts to its last token."""
        started = monotonic()
        self._begin(prompts, max_tokens)
        tokens = 0
        while self._runtime.active:
            tokens += len(self._runtime.step().tokens)
        return tokens / (monotonic() - started)

    def close(self) -> None:
        """Free the runtime."""
        self._runtime.close()

    def _begin(self, prompts: list[str], max_tokens: int) -> list[int]:
        options = RequestOptions(max_tokens=max_tokens, ignore_eos=True)
        rows = rows_of([self._tokenizer.encode(one) for one in prompts], options)
        return self._runtime.admit(rows)


def arrivals(socket: Path, requests: int, max_tokens: int) -> Arrivals:
    """Send `requests` requests one after the other and time every token, but those of a warm-up."""
    warm_up, seen = Arrivals(), Arrivals()
    with Client(socket) as client:
        for number in range(_WARM_UP + requests):
            _one(client, max_tokens, warm_up if number < _WARM_UP else seen)
    return seen


def throughputs(
    socket: Path, loop: InProcessLoop, rounds: int, max_tokens: int
) -> tuple[float, float]:
    """Median throughput at 8 streams of the daemon and of the in-process loop, taking turns."""
    daemon: list[float] = []
    in_process: list[float] = []
    for turn in range(rounds):
        note(f"throughput: round {turn + 1} of {rounds}")
        daemon.append(uvloop.run(_throughput(socket, max_tokens)))
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
    sent = monotonic()
    stream = client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, timestamps=True)
    for delta in stream:
        now = monotonic()
        if delta.ended is None:
            continue
        if delta.seq == 0:
            seen.ttft.append(now - sent)
            seen.first.append(now - delta.ended)
        else:
            seen.tokens.append(now - delta.ended)


async def _throughput(socket: Path, max_tokens: int) -> float:
    """Tokens a second of 8 clients at once, from the first request to the last token."""
    async with connected(socket, STREAMS) as clients:
        started = monotonic()
        counts = await asyncio.gather(*(_drain(client, max_tokens) for client in clients))
        return sum(counts) / (monotonic() - started)


async def _drain(client: AsyncClient, max_tokens: int) -> int:
    stream = await client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True)
    await stream.text()
    return len(stream.tokens)
