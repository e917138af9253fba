import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import click
import pytest
from click.testing import CliRunner

from hearth.bench import toy_daemon
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, Usage
from tests.bench.running import run as run_bench
from tests.system import soak
from tests.system.soak import Sample, Soak, SoakFigures, judge


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

    monkeypatch.setattr(toy_daemon, "AsyncClient", connect)
    monkeypatch.setattr(FakeClient, "refuses", refuses)
    monkeypatch.setattr(soak, "_PAUSE_S", 0.0)
    found = Soak(Path("socket"), os.getpid(), seconds)
    await found.run()
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


def judged(
    mb_per_10000: float, *, handles: int = 40, handles_growth: int = 0, warm_up_mb: float = 0.0
) -> SoakFigures:
    noise = random.Random(1)
    samples = []
    for index in range(100):
        requests = 100 * index
        rss = 80 + mb_per_10000 * requests / 10_000 + noise.uniform(-0.05, 0.05)
        rss += warm_up_mb * min(1.0, index / 15)
        samples.append(
            Sample(
                seconds=6.0 * index,
                requests=requests,
                rss_bytes=round(rss * 1e6),
                handles=handles + handles_growth * index // 100 + noise.randint(0, 1),
            )
        )
    return judge(samples, aborted=7)


def test_noise_is_flat() -> None:
    found = judged(0.0)
    assert found.flat
    assert found.mb_per_10000_requests == pytest.approx(0.0, abs=0.2)
    assert (found.requests, found.aborted, found.handles) == (9900, 7, 40 + found.handles - 40)


@pytest.mark.parametrize(("growth", "flat"), [(0.5, True), (2.0, False), (50.0, False)])
def test_a_leak_is_measured_and_judged(growth: float, flat: bool) -> None:  # noqa: FBT001 - a parameter of the test
    found = judged(growth)
    assert found.mb_per_10000_requests == pytest.approx(growth, abs=0.2)
    assert found.mb_per_minute == pytest.approx(growth / 10, abs=0.05)
    assert found.flat is flat


def test_growth_during_the_warm_up_does_not_count() -> None:
    assert judged(0.0, warm_up_mb=30.0).flat


def test_open_handles_that_pile_up_are_not_flat() -> None:
    found = judged(0.0, handles_growth=20)
    assert found.handles_growth > 5
    assert not found.flat


def test_failures_and_short_runs_are_not_flat() -> None:
    sample = Sample(seconds=0, requests=0, rss_bytes=1, handles=1)
    steady = [Sample(seconds=i, requests=i, rss_bytes=1, handles=1) for i in range(20)]
    assert judge(steady).flat
    assert not judge(steady, failed=1).flat
    assert not judge(steady, left=1).flat
    assert not judge([sample, sample]).flat


def test_a_real_engine_has_steps_of_its_own(toy: Path) -> None:
    words = ["--engine", str(toy), "--step-ms", "2"]
    with pytest.raises(click.UsageError, match="--step-ms is for the simulated engine"):
        CliRunner().invoke(soak.soak, words, standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(
    "words", [("--step-ms", "inf"), ("--seconds", "nan"), ("--seconds", "inf")]
)
def test_what_nothing_takes_is_wrong_usage(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "given_or_toy", pytest.fail)
    assert CliRunner().invoke(soak.soak, words).exit_code == 2


def test_the_command_counts_and_judges() -> None:
    code, figures = run_bench("--seconds", "3", "--step-ms", "0.2", command=soak.soak)
    assert figures["failed"] == 0
    assert figures["requests"] > figures["aborted"] > 0
    assert figures["rss_mb"] > 20
    assert figures["handles"] > 10
    assert figures["left"] == 0
    assert code == (0 if figures["flat"] else 1)
