"""Pictures and text at the same time, by clients that ask again and again."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from time import monotonic

import msgspec
from hearth_client import AsyncClient, Image

from bench.toy_daemon import connected
from bench.vision.asking import QUESTION

CLIENTS = 4
_PROMPT = "tell me of the lamps in the house"
_REPLY = 64
_LONGER = 8


class Rates(msgspec.Struct):
    """Tokens of text, and pictures that were encoded and answered with one token, a second."""

    tokens_per_s: float = 0.0
    images_per_s: float = 0.0


async def rates(
    socket: Path, files: Iterator[bytes], seconds: float, *, texts: int, images: int
) -> Rates:
    """Let so many clients ask for text, and others about new pictures, for `seconds`."""
    async with connected(socket, texts + images) as clients:
        end = monotonic() + seconds
        told = (_tell(client, end) for client in clients[:texts])
        seen = (_see(client, files, end) for client in clients[texts:])
        counts = await asyncio.gather(*told, *seen)
    return Rates(sum(counts[:texts]) / seconds, sum(counts[texts:]) / seconds)


async def answers(socket: Path, files: Sequence[Sequence[bytes]], tokens: int) -> float:
    """Seconds until as many clients as there are lists have answers about all their pictures.

    Each client has replies of its own length, from `tokens` on, so that they fall out of step.
    """
    async with connected(socket, len(files)) as clients:
        started = monotonic()
        asked = zip(clients, files, count(tokens, _LONGER), strict=False)
        await asyncio.gather(*(_ask_all(*each) for each in asked))
        return monotonic() - started


async def _tell(client: AsyncClient, end: float) -> int:
    tokens = 0
    while monotonic() < end:
        stream = await client.generate(_PROMPT, max_tokens=_REPLY, ignore_eos=True)
        async for delta in stream:
            tokens += len(delta.tokens) if monotonic() < end else 0
    return tokens


async def _see(client: AsyncClient, files: Iterator[bytes], end: float) -> int:
    seen = 0
    while monotonic() < end:
        await _ask_all(client, [next(files)], 1)
        seen += monotonic() < end
    return seen


async def _ask_all(client: AsyncClient, files: Sequence[bytes], tokens: int) -> None:
    for data in files:
        turn = {"role": "user", "content": [Image(data), QUESTION]}
        stream = await client.generate(messages=[turn], max_tokens=tokens, ignore_eos=True)
        await stream.text()
