from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, Usage

from bench import connections, soak
from bench.soak import Soak


class FakeGeneration:
    def __init__(self, tokens: int) -> None:
        self.done: Done | None = None
        self._tokens = tokens
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for seq in range(self._tokens):
            if self._cancelled:
                break
            yield Delta(id="1", seq=seq, text="x", tokens=[seq])
        reason: Any = "cancelled" if self._cancelled else "length"
        self.done = Done(id="1", reason=reason, usage=Usage(prompt_tokens=1, completion_tokens=1))


class FakeClient:
    """Serves everything, but refuses every twentieth request when `refuses` is set."""

    refuses = False

    def __init__(self, address: Path) -> None:
        self.prompts: list[str] = []
        self.address = address

    async def generate(self, prompt: str, *, max_tokens: int, ignore_eos: bool) -> FakeGeneration:
        assert ignore_eos
        await anyio.sleep(0.001)
        self.prompts.append(prompt)
        if self.refuses and len(self.prompts) % 20 == 0:
            raise HearthClientError("refused")
        return FakeGeneration(max_tokens)


async def run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    refuses: bool = False,
    seconds: float = 0.5,
    connect_s: float = 0.0,
) -> Soak:
    @asynccontextmanager
    async def connect(address: Path) -> AsyncIterator[FakeClient]:
        await anyio.sleep(connect_s)
        yield FakeClient(address)

    monkeypatch.setattr(connections, "AsyncClient", connect)
    monkeypatch.setattr(FakeClient, "refuses", refuses)
    monkeypatch.setattr(soak, "_PAUSE_S", 0.0)
    found = Soak(Path("socket"), 1, seconds)
    seen: list[object] = []
    await found.run(seen.append)
    assert seen == found.samples
    return found


async def test_a_fifth_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await run(monkeypatch)
    assert found.failed == 0
    assert found.requests > 50
    # A cancel that falls on the last token comes too late to be one.
    assert 0.08 < found.aborted / found.requests < 0.35


async def test_samples_grow_with_time_and_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = (await run(monkeypatch)).samples
    assert len(samples) > 20
    assert [one.seconds for one in samples] == sorted(one.seconds for one in samples)
    assert 0 < samples[len(samples) // 2].requests <= samples[-1].requests


async def test_the_time_to_connect_is_not_part_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await run(monkeypatch, seconds=0.1, connect_s=0.05)
    assert len(found.samples) > 1


async def test_refusals_are_counted_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await run(monkeypatch, refuses=True)
    assert 0 < found.failed < found.requests / 4


def test_prompts_speak_a_small_language() -> None:
    words = Soak(Path("socket"), 1, 1.0)._words
    assert words == Soak(Path("socket"), 1, 1.0)._words
    assert len(words) == 500
    assert max(map(len, words)) <= 10
