"""The time of a decode step through a whole daemon: front door, actors and executor process."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import uvloop
from hearth_client import AsyncClient

from bench.toy_daemon import connected
from daemon.own_daemon import own_daemon
from runtime.errors import HearthError

PROMPT = "switch the light on"
_TOKENS = 256
_SETTLE = 16
Arrival = tuple[float, int]
"""When the step of a delta ended, in seconds, and how many tokens the delta tells of."""
_FLAGS = ("--fill-wait-ms", "500", "--no-verify", "--log-level", "warning")


def actor_step_s(engine: Path, batch: int, tokens: int = _TOKENS) -> float:
    """Median seconds from the end of a step in the executor to the end of the next.

    `batch` clients fill one batch; the steps before all of them are in it are left out.
    """
    with own_daemon(engine, _FLAGS) as daemon:
        rows = uvloop.run(_rows(daemon.socket, batch, tokens))
        daemon.stop()
    rows = [row[_SETTLE:] for row in rows]
    if len({ended for row in rows for ended, _ in row}) > tokens:
        raise HearthError("internal", "the rows of the measurement were not in one batch")
    return median(step for row in rows for step in step_times(row))


def step_times(row: Sequence[Arrival]) -> list[float]:
    """Seconds of the steps behind a row's deltas; one that tells of several is left out."""
    return [end - before for (before, _), (end, tokens) in pairwise(row) if tokens == 1]


async def _rows(socket: Path, batch: int, tokens: int) -> list[list[Arrival]]:
    async with connected(socket, batch) as clients:
        return await asyncio.gather(*(_row(client, tokens) for client in clients))


async def _row(client: AsyncClient, tokens: int) -> list[Arrival]:
    # A model of random weights repeats itself, and lookup would speculate: plain steps are wanted.
    stream = await client.generate(
        PROMPT, max_tokens=tokens, ignore_eos=True, timestamps=True, speculation=False
    )
    return [(one.ended, len(one.tokens)) async for one in stream if one.ended is not None]
