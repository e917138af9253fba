"""Clients that send requests at their time, or one after the other, and note what comes when."""

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from time import monotonic

import msgspec

from hearth.bench.arrivals.ideal import Ask
from hearth.bench.toy_daemon import connected
from hearth_client import AsyncClient, HearthClientError

CONNECTIONS = 16
_LEAD_S = 0.05
_LOOK_S = 0.2
_TIMER_S = 0.002
"""A loop's timers count whole milliseconds: the last two pass in turns of the loop."""


class Seen(msgspec.Struct, kw_only=True):
    """One request at its client; times in seconds of the monotonic clock.

    `due` is when it had to be sent. `first` is the receipt of the first token,
    `ended` when the executor's step of each token ended; several tokens in one delta are those of
    its last step. `reason` is empty for a request that failed; that one was answered with `code`
    `failed_s` seconds after it had been sent, and told to come again after `retry_after_s`.
    """

    ask: Ask
    due: float
    first: float = 0.0
    tokens: list[int] = []
    ended: list[float] = []
    reason: str = ""
    code: str = ""
    failed_s: float = 0.0
    retry_after_s: float | None = None


class Watched(msgspec.Struct):
    """All requests of a load, which began at `began`; `late` are seconds of the clients' own."""

    began: float
    seen: list[Seen]
    late: list[float]


async def open_loop(socket: Path, asks: Iterable[Ask], clients: int = 0) -> Watched:
    """Send each request at its time, whether earlier ones have ended or not.

    Each is of one of so many `clients` by chance, always the same one; 0 is for connections that
    take turns.
    """
    async with connected(socket, clients or CONNECTIONS) as connections:
        began = monotonic() + _LEAD_S
        tasks, late = [], []
        chance = random.Random(clients)  # noqa: S311 - a choice, not a secret
        senders = iter(lambda: chance.choice(connections), None) if clients else cycle(connections)
        for client, ask in zip(senders, asks, strict=False):
            due = began + ask.at
            late.append(await _until(due))
            tasks.append(asyncio.ensure_future(watch(client, ask, due)))
        return Watched(began, await asyncio.gather(*tasks), late)


async def closed_loop(socket: Path, asks: Sequence[Ask], clients: int, seconds: float) -> Watched:
    """Let each client send the next request when its last one has ended, for `seconds`."""
    following = cycle(asks)
    async with connected(socket, clients) as connections:
        began = monotonic()
        end = began + seconds
        late = asyncio.ensure_future(_lateness(end))
        watched = await asyncio.gather(*(_in_turn(one, following, end) for one in connections))
        return Watched(began, [one for each in watched for one in each], await late)


async def _in_turn(client: AsyncClient, following: Iterator[Ask], end: float) -> list[Seen]:
    seen: list[Seen] = []
    while not seen or monotonic() < end:
        seen.append(await watch(client, next(following), monotonic()))
    return seen


async def watch(client: AsyncClient, ask: Ask, due: float) -> Seen:
    """Send one request that was due at a time, and note what comes."""
    seen, sent = Seen(ask=ask, due=due), monotonic()
    try:
        stream = await client.generate(
            ask.prompt,
            max_tokens=ask.tokens,
            ignore_eos=True,
            timestamps=True,
            adapter=ask.adapter,
        )
        async for delta in stream:
            if not seen.tokens:
                seen.first = monotonic()
            if delta.ended is not None:
                seen.ended += [delta.ended] * len(delta.tokens)
            seen.tokens += delta.tokens
    except HearthClientError as error:
        seen.code, seen.retry_after_s = error.code, error.retry_after_s
        seen.failed_s = monotonic() - sent
        return seen
    seen.reason = stream.done.reason if stream.done else ""
    return seen


async def _lateness(end: float) -> list[float]:
    """Seconds by which this loop is late, sampled now and then."""
    late: list[float] = []
    while (due := monotonic() + _LOOK_S) < end:
        late.append(await _until(due))
    return late


async def _until(due: float) -> float:
    """Wait for a time; gives by how many seconds it is over."""
    left = due - monotonic() - _TIMER_S
    if left > 0:
        await asyncio.sleep(left)
    while monotonic() < due:  # noqa: ASYNC110 - nobody sets an event at a time
        await asyncio.sleep(0)
    return monotonic() - due
