from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, Usage

from bench.load_clients import LoadClients
from bench.load_messages import LoadJob
from bench.simulated_truth import simulated_stream
from bench.stream_check import Tally
from runtime.config import load_config
from runtime.text import Tokenizer

Fault = Callable[[list[Delta]], list[Delta]]
TOKENS = 12


class FakeStream:
    def __init__(self, deltas: list[Delta], done: Done | None) -> None:
        self.done = done
        self._deltas = deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            yield delta


class FakeDaemon:
    """Answers truly but for one request, whose deltas go through `fault`."""

    def __init__(self, toy: Path, fault: Fault, done: Done | None = None) -> None:
        self._config = load_config(toy)
        self._tokenizer = Tokenizer.open(toy)
        self._fault = fault
        self._odd_done = done
        self.requests = 0

    async def start(self, prompt: str) -> FakeStream:
        self.requests += 1
        tokens = simulated_stream(self._config, self._tokenizer.encode(prompt), TOKENS)
        deltas = [Delta(id="1", seq=i, text="", tokens=[t]) for i, t in enumerate(tokens)]
        usage = Usage(prompt_tokens=1, completion_tokens=TOKENS)
        done = Done(id="1", reason="length", usage=usage)
        if self.requests == 3:
            return FakeStream(self._fault(deltas), self._odd_done or done)
        return FakeStream(deltas, done)


async def tally(toy: Path, fault: Fault, done: Done | None = None) -> Tally:
    job = LoadJob(socket="", engine=str(toy), clients=1, requests=5, max_tokens=TOKENS, seed=3)
    progress: list[int] = []
    clients = LoadClients(job, progress.append)
    await clients.drain(FakeDaemon(toy, fault, done).start)
    assert progress == [1, 2, 3, 4, 5]
    assert clients.tally.requests == 5
    return clients.tally


async def test_a_true_daemon_is_clean(toy: Path) -> None:
    found = await tally(toy, lambda deltas: deltas)
    assert found.clean
    assert found.tokens == 5 * TOKENS


async def test_one_drop_is_reported(toy: Path) -> None:
    found = await tally(toy, lambda deltas: deltas[:4] + deltas[5:])
    assert (found.lost, found.doubled, found.disordered) == (1, 0, 0)


async def test_one_double_is_reported(toy: Path) -> None:
    found = await tally(toy, lambda deltas: deltas[:5] + deltas[4:])
    assert (found.lost, found.doubled, found.disordered) == (0, 1, 0)


async def test_one_swap_is_reported(toy: Path) -> None:
    found = await tally(toy, lambda d: [*d[:4], d[5], d[4], *d[6:]])
    assert (found.lost, found.doubled, found.disordered) == (0, 0, 1)


async def test_a_failed_request_has_lost_its_tokens(toy: Path) -> None:
    def fail(_: list[Delta]) -> list[Delta]:
        raise HearthClientError("gone")

    found = await tally(toy, fail)
    assert (found.failed, found.lost) == (1, TOKENS)


@pytest.mark.parametrize(
    "done",
    [
        Done(id="1", reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=TOKENS)),
        Done(id="1", reason="length", usage=Usage(prompt_tokens=1, completion_tokens=TOKENS - 1)),
    ],
)
async def test_a_wrong_end_is_reported(toy: Path, done: Done) -> None:
    found = await tally(toy, lambda deltas: deltas, done)
    assert (found.misended, found.lost) == (1, 0)
    assert not found.clean
