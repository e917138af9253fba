from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.bench import toy_daemon
from hearth.bench.load import split_job
from hearth.bench.load_clients import LoadClients, LoadJob, Tally, simulated_stream
from hearth.runtime.config import load_config
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, Usage
from tests.bench.running import run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "clients", "processes"), [(10_000, 32, 4), (10, 7, 3), (2, 4, 4)]
)
def test_nothing_is_lost_in_the_split(requests: int, clients: int, processes: int) -> None:
    whole = LoadJob(socket="s", engine="e", clients=clients, requests=requests, max_tokens=64)
    jobs = split_job(whole, processes)
    assert sum(job.requests for job in jobs) == requests
    assert sum(job.clients for job in jobs) == clients
    assert min(job.clients for job in jobs) >= 1
    assert len({job.seed for job in jobs}) == processes
    assert {(job.socket, job.max_tokens) for job in jobs} == {("s", 64)}


@pytest.mark.slow
def test_nothing_is_wrong_with_the_real_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    sizes = ("--requests", "41", "--clients", "6", "--processes", "2", "--max-tokens", "16")
    code, figures = run("load", *sizes, "--step-ms", "0.2")
    assert code == 0
    assert figures["tokens"] == 41 * 16
    assert {name: figures[name] for name in ("requests", "lost", "doubled", "disordered")} == {
        "requests": 41,
        "lost": 0,
        "doubled": 0,
        "disordered": 0,
    }


@pytest.mark.slow
def test_a_process_with_nothing_to_send_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    sizes = ("--requests", "1", "--clients", "2", "--processes", "2", "--max-tokens", "4")
    code, figures = run("load", *sizes, "--step-ms", "0.2")
    assert (code, figures["requests"], figures["tokens"]) == (0, 1, 4)
    assert "type" not in figures


Fault = Callable[[list[Delta]], list[Delta]]
TOKENS = 12


class FakeStream:
    def __init__(self, deltas: list[Delta], done: Done | None) -> None:
        self.done = done
        self._deltas = deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            yield delta


class FakeClient:
    """Answers truly but for one request, whose deltas go through `fault`."""

    def __init__(self, toy: Path, fault: Fault, done: Done | None = None) -> None:
        self._config = load_config(toy)
        self._tokenizer = Tokenizer.open(toy)
        self._fault = fault
        self._odd_done = done
        self.requests = 0

    async def generate(self, prompt: str, *, max_tokens: int, ignore_eos: bool) -> FakeStream:
        assert TOKENS // 2 <= max_tokens <= TOKENS + TOKENS // 2
        assert ignore_eos
        self.requests += 1
        tokens = simulated_stream(self._config, self._tokenizer.encode(prompt), max_tokens)
        deltas = [Delta(id="1", seq=i, text="", tokens=[t]) for i, t in enumerate(tokens)]
        usage = Usage(prompt_tokens=1, completion_tokens=max_tokens)
        done = Done(id="1", reason="length", usage=usage)
        if self.requests == 3:
            return FakeStream(self._fault(deltas), self._odd_done or done)
        return FakeStream(deltas, done)


Tallied = Callable[..., Awaitable[Tally]]


@pytest.fixture
def tallied(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Tallied:
    """The tally of five requests of one client, one of them with a fault."""

    async def run(fault: Fault, done: Done | None = None) -> Tally:
        @asynccontextmanager
        async def connect(address: str) -> AsyncIterator[FakeClient]:
            assert address == "socket"
            yield FakeClient(toy, fault, done)

        monkeypatch.setattr(toy_daemon, "AsyncClient", connect)
        progress: list[int] = []
        job = LoadJob(socket="socket", engine=str(toy), clients=1, requests=5, max_tokens=TOKENS)
        clients = LoadClients(
            job, lambda one: progress.append(one.requests), lambda: progress.append(0)
        )
        found = await clients.run()
        assert progress == [0, 1, 2, 3, 4, 5]
        assert found.requests == 5
        return found

    return run


async def test_a_true_daemon_is_clean(tallied: Tallied) -> None:
    found = await tallied(lambda deltas: deltas)
    assert found.clean
    assert found.tokens == 5 * TOKENS


async def test_one_drop_is_reported(tallied: Tallied) -> None:
    found = await tallied(lambda deltas: deltas[:4] + deltas[5:])
    assert (found.lost, found.doubled, found.disordered) == (1, 0, 0)


async def test_a_failed_request_has_lost_its_tokens(tallied: Tallied) -> None:
    def fail(_: list[Delta]) -> list[Delta]:
        raise HearthClientError("gone")

    found = await tallied(fail)
    assert (found.failed, found.lost) == (1, 5 * TOKENS - found.tokens)
    assert found.lost >= TOKENS // 2


@pytest.mark.parametrize(
    "done",
    [
        Done(id="1", reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=TOKENS)),
        Done(id="1", reason="length", usage=Usage(prompt_tokens=1, completion_tokens=1)),
    ],
)
async def test_a_wrong_end_is_reported(tallied: Tallied, done: Done) -> None:
    found = await tallied(lambda deltas: deltas, done)
    assert (found.misended, found.lost) == (1, 0)
    assert not found.clean


TRUTH = [7, 3, 3, 9, 12, 5, 7, 1]
STREAMS = st.lists(st.integers(0, 6), max_size=30)


def tally(received: Sequence[int], expected: Sequence[int] = TRUTH) -> Tally:
    found = Tally()
    found.check(expected, received)
    return found


def faults(found: Tally) -> tuple[int, int, int]:
    return found.lost, found.doubled, found.disordered


def test_a_true_stream_is_clean() -> None:
    found = tally(TRUTH)
    assert found.clean
    assert (found.requests, found.tokens) == (1, 8)


@pytest.mark.parametrize(
    ("received", "found"),
    [
        *((TRUTH[:index] + TRUTH[index + 1 :], (1, 0, 0)) for index in range(len(TRUTH))),
        *((TRUTH[: index + 1] + TRUTH[index:], (0, 1, 0)) for index in range(len(TRUTH))),
        ([3, 7, *TRUTH[2:]], (0, 0, 1)),
        ([*TRUTH[:-1], 99], (1, 1, 0)),
        ([3, 7, 3, 9, 9, 12, 5, 7], (1, 1, 1)),
    ],
)
def test_lost_doubled_and_disordered_tokens_are_told_apart(
    received: list[int], found: tuple[int, int, int]
) -> None:
    assert faults(tally(received)) == found


@given(expected=STREAMS, received=STREAMS)
def test_only_equal_streams_are_clean(expected: list[int], received: list[int]) -> None:
    found = tally(received, expected)
    assert found.clean is (expected == received)
    assert min(faults(found)) >= 0


@given(expected=STREAMS, data=st.data())
def test_a_reordered_stream_loses_nothing(expected: list[int], data: st.DataObject) -> None:
    found = tally(data.draw(st.permutations(expected)), expected)
    assert (found.lost, found.doubled) == (0, 0)


def test_tallies_add_up() -> None:
    total = tally(TRUTH)
    total.add(tally(TRUTH[1:]))
    total.add(Tally(failed=1, misended=2))
    assert msgspec.structs.asdict(total) == {
        "requests": 2,
        "tokens": 15,
        "lost": 1,
        "doubled": 0,
        "disordered": 0,
        "failed": 1,
        "misended": 2,
    }
    assert not Tally(misended=1).clean


def test_the_truth_is_what_the_simulated_engine_says(toy: Path) -> None:
    prompts = [[5, 9, 300], [258], [17] * 40]
    rows = [
        RowRequest(
            token_ids=list(ids),
            prompt_length=len(ids),
            options=RequestOptions(max_tokens=50, ignore_eos=True),
        )
        for ids in prompts
    ]
    with closing(LLMInferenceRuntime.open(toy, RuntimeOptions(engine_kind="simulated"))) as runtime:
        said = runtime.handle_request(GenerationRequest(rows=rows)).rows
    config = load_config(toy)
    for row, prompt in zip(said, prompts, strict=True):
        assert row.token_ids == simulated_stream(config, prompt, 50)
        assert len(set(row.token_ids)) > 25
