"""The clients of `bench load`, in a process of their own.

`python -m hearth.bench.load_clients JOB`


They send random prompts to the simulated engine and check every token that comes back.
"""

import asyncio
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from hearth.bench.child_process import ParentProcess
from hearth.bench.toy_daemon import connected
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.executor.simulated_engine import simulated_next_tokens
from hearth.runtime.lora.adapter import simulated_shift
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import AsyncClient, HearthClientError

_LETTERS = string.ascii_letters + string.digits + " .,?"
_LONGEST_PROMPT = 120
_PROGRESS_EVERY = 250


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """One process: `clients` connections that send `requests` in all, one at a time each.

    Replies have half to one and a half of `max_tokens`, and all of them as many as that together.
    """

    socket: str
    engine: str
    clients: int
    requests: int
    max_tokens: int
    seed: int = 0


class Connected(msgspec.Struct, frozen=True, tag=True):
    """All clients of a process are connected, and wait for `Go`."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """Send: the clients of all processes are connected."""


class Tally(msgspec.Struct, kw_only=True, tag=True):
    """Counts of a check so far: requests and tokens, and the faults among them.

    `lost` tokens never came (those of a failed request included), `doubled` ones came though
    they were not sent (again), `disordered` ones came in another place. `failed` requests ended in
    an error, `misended` ones with another reason or count than asked for.
    """

    requests: int = 0
    tokens: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    failed: int = 0
    misended: int = 0

    @property
    def clean(self) -> bool:
        """True where nothing at all went wrong."""
        return not (self.lost or self.doubled or self.disordered or self.failed or self.misended)

    def check(self, expected: Sequence[int], received: Sequence[int]) -> None:
        """Compare one stream with the truth."""
        self.requests += 1
        self.tokens += len(received)
        if list(expected) == list(received):
            return
        sent, got = Counter(expected), Counter(received)
        self.lost += (sent - got).total()
        self.doubled += (got - sent).total()
        self.disordered += (sent & got).total() - _in_order(expected, received)

    def add(self, other: "Tally") -> None:
        """Count another tally in."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _in_order(one: Sequence[int], other: Sequence[int]) -> int:
    # Length of the longest common subsequence, by dynamic programming over rows.
    row = [0] * (len(other) + 1)
    for left in one:
        diagonal = 0
        for index, right in enumerate(other, start=1):
            above = row[index]
            row[index] = diagonal + 1 if left == right else max(above, row[index - 1])
            diagonal = above
    return row[-1]


class LoadClients:
    """Runs the requests of one process and tallies what came back.

    `together` is called, on another thread, once all clients are connected, and returns when they
    may send.
    """

    def __init__(
        self, job: LoadJob, progress: Callable[[Tally], None], together: Callable[[], object]
    ) -> None:
        self.tally = Tally()
        self._job = job
        self._progress = progress
        self._together = together
        self._config = load_config(Path(job.engine))
        self._tokenizer = Tokenizer.open(Path(job.engine))
        rng = random.Random(job.seed)  # noqa: S311 - prompts, not secrets
        prompts = [
            "".join(rng.choices(_LETTERS, k=rng.randint(1, _LONGEST_PROMPT)))
            for _ in range(job.requests)
        ]
        self._requests = zip(prompts, _lengths(job, rng), strict=True)

    async def run(self) -> Tally:
        """Connect all clients and send everything, each client one request at a time."""
        async with connected(self._job.socket, self._job.clients) as clients:
            await asyncio.to_thread(self._together)
            await asyncio.gather(*(self._drain(client) for client in clients))
        return self.tally

    async def _drain(self, client: AsyncClient) -> None:
        for prompt, count in self._requests:
            await self._request(client, prompt, count)
            self._progress(self.tally)

    async def _request(self, client: AsyncClient, prompt: str, count: int) -> None:
        expected = simulated_stream(self._config, self._tokenizer.encode(prompt), count)
        received: list[int] = []
        try:
            stream = await client.generate(prompt, max_tokens=count, ignore_eos=True)
            async for delta in stream:
                received += delta.tokens
        except HearthClientError:
            self.tally.failed += 1
        else:
            end = stream.done and (stream.done.reason, stream.done.usage.completion_tokens)
            self.tally.misended += end != ("length", count)
        self.tally.check(expected, received)


def _lengths(job: LoadJob, rng: random.Random) -> list[int]:
    mean, pairs = job.max_tokens, job.requests // 2
    apart = [rng.randint(0, mean // 2) for _ in range(pairs)]
    lengths = [length for one in apart for length in (mean - one, mean + one)]
    return [*lengths, mean] if job.requests % 2 else lengths


def simulated_stream(
    config: LLMEngineRunnerConfig, prompt: list[int], count: int, adapter: str = ""
) -> list[int]:
    """The `count` tokens that the simulated engine must answer to the prompt's ids."""
    shift = simulated_shift(adapter)
    stream = prompt[-1:]
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        here = np.array(stream[-1:]), np.array([position])
        after = simulated_next_tokens(*here, config.vocab_size, config.eos_token_ids, shift)
        stream.append(int(after[0]))
    return stream[1:]


def main() -> None:
    """Serve as the child: run the job, sending the tally from time to time and when it is whole."""
    parent = ParentProcess()

    def report(tally: Tally) -> None:
        if tally.requests % _PROGRESS_EVERY == 0:
            parent.send(tally)

    def together() -> None:
        parent.send(Connected())
        parent.receive(Go)

    clients = LoadClients(parent.job(LoadJob), report, together)
    parent.send(uvloop.run(clients.run()))


if __name__ == "__main__":
    main()
