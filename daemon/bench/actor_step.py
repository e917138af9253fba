"""The time of a decode step through a whole daemon: front door, actors and executor process."""

import asyncio
from itertools import pairwise
from pathlib import Path
from statistics import median

import uvloop
from hearth_client import AsyncClient

from daemon.bench.connections import connected
from daemon.own_daemon import own_daemon
from runtime.errors import HearthError

PROMPT = "switch the light on"
_TOKENS = 256
_SETTLE = 16
_FLAGS = ("--fill-wait-ms", "500", "--no-verify", "--log-level", "warning")


def actor_step_s(engine: Path, batch: int, tokens: int = _TOKENS) -> float:
    """Median seconds from the end of a step in the executor to the end of the next.

    `batch` clients fill one batch; the steps before all of them are in it are left out.
    """
    with own_daemon(engine, _FLAGS) as daemon:
        ends = uvloop.run(_ends(daemon.socket, batch, tokens))
        daemon.stop()
    steps = sorted({end for row in ends for end in row[_SETTLE:]})
    if len(steps) > tokens:
        raise HearthError("internal", "the rows of the measurement were not in one batch")
    return median(later - earlier for earlier, later in pairwise(steps))


async def _ends(socket: Path, batch: int, tokens: int) -> list[list[float]]:
    async with connected(socket, batch) as clients:
        return await asyncio.gather(*(_one(client, tokens) for client in clients))


async def _one(client: AsyncClient, tokens: int) -> list[float]:
    stream = await client.generate(PROMPT, max_tokens=tokens, ignore_eos=True, timestamps=True)
    return [delta.ended async for delta in stream if delta.ended is not None]
