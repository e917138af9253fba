"""The clients of `bench load`: they send random prompts and check every token that comes back."""

import asyncio
import random
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from hearth_client import HearthClientError
from hearth_client.options import GenerateOptions
from hearth_client.protocol import Delta, Done

from bench.connections import connected
from bench.load_messages import LoadJob
from bench.simulated_truth import simulated_stream
from bench.stream_check import Tally
from runtime.config import load_config
from runtime.text import Tokenizer

_LETTERS = string.ascii_letters + string.digits + " .,?"
_LONGEST_PROMPT = 120


class Stream(Protocol):
    """What the bench uses of a generation."""

    @property
    def done(self) -> Done | None:
        """How it ended."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas in the order of their arrival."""


Start = Callable[[str], Awaitable[Stream]]
"""Starts a generation for a prompt."""


class LoadClients:
    """Runs the requests of one process and tallies what came back."""

    def __init__(self, job: LoadJob, progress: Callable[[int], None]) -> None:
        self.tally = Tally()
        self._job = job
        self._progress = progress
        self._config = load_config(Path(job.engine))
        self._tokenizer = Tokenizer.open(Path(job.engine))
        rng = random.Random(job.seed)  # noqa: S311 - prompts, not secrets
        self._prompts = iter(
            [
                "".join(rng.choices(_LETTERS, k=rng.randint(1, _LONGEST_PROMPT)))
                for _ in range(job.requests)
            ]
        )

    async def run(self) -> Tally:
        """Connect all clients and send everything."""
        async with connected(self._job.socket, self._job.clients) as clients:
            options: GenerateOptions = {"max_tokens": self._job.max_tokens, "ignore_eos": True}
            await asyncio.gather(
                *(self.drain(partial(client.generate, **options)) for client in clients)
            )
        return self.tally

    async def drain(self, start: Start) -> None:
        """Send prompts, one at a time, until none is left."""
        for prompt in self._prompts:
            await self._request(start, prompt)
            self._progress(self.tally.requests)

    async def _request(self, start: Start, prompt: str) -> None:
        count = self._job.max_tokens
        expected = simulated_stream(self._config, self._tokenizer.encode(prompt), count)
        received: list[int] = []
        try:
            stream = await start(prompt)
            async for delta in stream:
                received += delta.tokens
        except HearthClientError:
            self.tally.failed += 1
        else:
            self.tally.misended += not _ended_well(stream.done, count)
        self.tally.check(expected, received)


def _ended_well(done: Done | None, count: int) -> bool:
    return done is not None and done.reason == "length" and done.usage.completion_tokens == count
