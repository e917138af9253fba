"""Questions to a daemon, and where the time goes: pictures one by one, and beside text."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic

import msgspec

from hearth.bench.toy_daemon import connected
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.own_daemon import OwnDaemon
from hearth.runtime.errors import HearthError
from hearth_client import AsyncClient, Client, Image

QUESTION = "What colour is the circle?"


class Asked(msgspec.Struct, kw_only=True):
    """One question; seconds, `ttft` at the client and the others as the daemon's trace has them.

    `hand_over` is what of the time until the embeddings were there no stage took: messages, and
    what waits for them.
    """

    ttft: float
    tokenize: float
    decode: float
    resize: float
    engine: float
    hand_over: float
    queue: float
    prefill: float
    token: int
    tokens: int
    cached: bool

    @property
    def ready(self) -> float:
        """Seconds from the receipt of the last frame until the embeddings were there."""
        return self.tokenize + self.encode

    @property
    def encode(self) -> float:
        """Seconds from the prompt's tokens until the embeddings were there."""
        return self.decode + self.resize + self.engine + self.hand_over


class Asker:
    """Asks one daemon about pictures."""

    def __init__(self, daemon: OwnDaemon, client: Client) -> None:
        self._daemon = daemon
        self._client = client

    def ask(self, data: bytes) -> Asked:
        """Ask about the picture of a file and wait for one token."""
        started = monotonic()
        turn = {"role": "user", "content": [Image(data), QUESTION]}
        reply = self._client.generate(messages=[turn], max_tokens=1, temperature=0)
        next(iter(reply))
        ttft = monotonic() - started
        reply.text()
        (ended,) = ask(Trace(last=1), TraceReport, str(self._daemon.socket)).requests
        if (images := ended.images) is None:
            raise HearthError("internal", "the daemon tells nothing of a picture")
        stages = [one / 1000 for one in (images.decode_ms, images.resize_ms, images.engine_ms)]
        return Asked(
            ttft=ttft,
            tokenize=ended.tokenize_s,
            decode=stages[0],
            resize=stages[1],
            engine=stages[2],
            hand_over=max(0.0, ended.images_s - sum(stages)),
            queue=ended.queue_s,
            prefill=ended.prefill_s,
            token=reply.tokens[0],
            tokens=images.tokens,
            cached=bool(images.cached),
        )


@contextmanager
def asker(daemon: OwnDaemon) -> Iterator[Asker]:
    """An asker with a connection of its own."""
    with Client(daemon.socket, timeout=60) as client:
        yield Asker(daemon, client)


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
