"""The bench of a client in Python, by clients/conformance/BENCH.md: its own, and gRPC's."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import msgspec

SIDE = 512
_ROUND_TRIPS, _STREAMS, _PICTURES = 200, 20, 10
PROMPT, TOKENS = "Once upon a time", 256
_SESSIONS = 32


class ClientFigures(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Microseconds of a `status` and of a delta, milliseconds of a picture, KiB of a session."""

    status_us: float
    delta_us: float
    image_ms: float
    rss_kb: float


class MeasuredSession(NamedTuple):
    """One session of the client that is measured; a blocking one never suspends.

    `stream` reads a reply of `TOKENS` tokens and returns the number of its deltas, `picture` sends
    pixels [512, 512, 4] and reads the reply.
    """

    status: Callable[[], Awaitable[object]]
    stream: Callable[[], Awaitable[int]]
    picture: Callable[[bytes], Awaitable[object]]
    close: Callable[[], Awaitable[object]]


Connect = Callable[[], Awaitable[MeasuredSession]]


def print_figures(connect: Connect) -> None:
    """Measure the client that `connect` opens sessions of, and print its figures."""
    figures = asyncio.run(_measure(connect))
    print(msgspec.json.encode(figures).decode())  # noqa: T201 - the contract


async def _measure(connect: Connect) -> ClientFigures:
    session = await _opened(connect)
    # First of all, as memory that was used and is free again would hide that of sessions.
    before = _resident_kb()
    more = [await _opened(connect) for _ in range(_SESSIONS)]
    rss_kb = (_resident_kb() - before) / _SESSIONS
    for one in more:
        await one.close()
    figures = ClientFigures(
        rss_kb=rss_kb,
        status_us=1e6 * await _median_s(_status_s, session, _ROUND_TRIPS),
        delta_us=1e6 * await _median_s(_delta_s, session, _STREAMS),
        image_ms=1e3 * await _median_s(_picture_s, session, _PICTURES),
    )
    await session.close()
    return figures


async def _opened(connect: Connect) -> MeasuredSession:
    session = await connect()
    await session.status()
    return session


async def _median_s(
    seconds: Callable[[MeasuredSession], Awaitable[float]], session: MeasuredSession, count: int
) -> float:
    """The median of `count` times, behind as many again by ten that are not counted."""
    warm_up = count // 10 + 1
    return median([await seconds(session) for _ in range(warm_up + count)][warm_up:])


async def _status_s(session: MeasuredSession) -> float:
    began = perf_counter()
    await session.status()
    return perf_counter() - began


async def _delta_s(session: MeasuredSession) -> float:
    began = perf_counter()
    deltas = await session.stream()
    return (perf_counter() - began) / deltas


async def _picture_s(session: MeasuredSession) -> float:
    # The daemon would know a picture again that it has seen.
    pixels = os.urandom(64) * (4 * SIDE * SIDE // 64)
    began = perf_counter()
    await session.picture(pixels)
    return perf_counter() - began


def _resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith("VmRSS:"))
