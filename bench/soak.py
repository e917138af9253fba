"""Clients that never rest: random sizes, one request in five broken off."""

import asyncio
import random
import string
import time
from collections.abc import Callable
from pathlib import Path

from hearth_client import AsyncClient, HearthClientError

from bench.connections import connected
from bench.flatness import Sample
from bench.process_memory import family_usage

ABORT_SHARE = 0.2
_CLIENTS = 8
_WORDS = 500
_LONGEST_WORD = 10
_LONGEST_PROMPT = 80
_LONGEST_REPLY = 128
_FEWEST_SAMPLES = 180
_PAUSE_S = 0.1


class Soak:
    """Loads the daemon at `socket` for `seconds` and samples the processes under `pid`."""

    def __init__(self, socket: Path, pid: int, seconds: float) -> None:
        self.requests = self.aborted = self.failed = 0
        self.samples: list[Sample] = []
        self._socket = socket
        self._pid = pid
        self._seconds = seconds
        self._random = random.Random(0)  # noqa: S311 - sizes, not secrets
        # A tokenizer remembers thousands of words: a language has an end, so that it fills soon.
        self._words = [self._word() for _ in range(_WORDS)]
        self._started = time.monotonic()

    async def run(self, progress: Callable[[Sample], None]) -> None:
        """Connect and run to the end; `progress` gets every sample, and there is at least one."""
        async with connected(self._socket, _CLIENTS) as clients:
            self._started = time.monotonic()
            await asyncio.gather(self._sample(progress), *(self._use(client) for client in clients))

    async def _sample(self, progress: Callable[[Sample], None]) -> None:
        while self._elapsed() < self._seconds:
            await asyncio.sleep(self._seconds / _FEWEST_SAMPLES)
            usage = family_usage(self._pid)
            self.samples.append(
                Sample(
                    seconds=self._elapsed(),
                    requests=self.requests,
                    rss_bytes=usage.rss_bytes,
                    handles=usage.handles,
                )
            )
            progress(self.samples[-1])

    async def _use(self, client: AsyncClient) -> None:
        while self._elapsed() < self._seconds:
            try:
                await self._request(client)
            except HearthClientError:
                self.failed += 1
                await asyncio.sleep(_PAUSE_S)
            self.requests += 1

    async def _request(self, client: AsyncClient) -> None:
        draw = self._random
        prompt = " ".join(draw.choices(self._words, k=draw.randint(1, _LONGEST_PROMPT)))
        reply = draw.randint(1, _LONGEST_REPLY)
        breaks_off = draw.randrange(reply) if draw.random() < ABORT_SHARE else None
        stream = await client.generate(prompt, max_tokens=reply, ignore_eos=True)
        if breaks_off == 0:
            stream.cancel()
        async for delta in stream:
            if breaks_off is not None and delta.seq + 1 == breaks_off:
                stream.cancel()
        self.aborted += stream.done is not None and stream.done.reason == "cancelled"

    def _word(self) -> str:
        length = self._random.randint(1, _LONGEST_WORD)
        return "".join(self._random.choices(string.ascii_lowercase, k=length))

    def _elapsed(self) -> float:
        return time.monotonic() - self._started
