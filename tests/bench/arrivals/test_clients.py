import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, Usage

from bench import toy_daemon
from bench.arrivals.clients import CONNECTIONS, closed_loop, open_loop
from bench.arrivals.workload import Ask

SOCKET = Path("socket")


class FakeStream:
    """Two deltas of three tokens, after a wait."""

    def __init__(self, wait_s: float, count: int) -> None:
        self.done: Done | None = None
        self._wait_s = wait_s
        self._count = count

    async def __aiter__(self) -> AsyncIterator[Delta]:
        await asyncio.sleep(self._wait_s)
        yield Delta(id="1", seq=0, text="a", tokens=[5], ended=1.0)
        yield Delta(id="1", seq=1, text="bc", tokens=[6, 7], ended=2.0)
        usage = Usage(prompt_tokens=5, completion_tokens=self._count)
        self.done = Done(id="1", reason="length", usage=usage)


class FakeDaemon:
    """Streams that take `wait_s`, and what was asked of whom; prompt "x" is refused."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.asked: list[tuple[object, dict[str, Any]]] = []

    @asynccontextmanager
    async def connect(self, _: Path) -> AsyncIterator["FakeClient"]:
        yield FakeClient(self)


class FakeClient:
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def generate(self, prompt: str, **options: Any) -> FakeStream:
        self._daemon.asked.append((self, options))
        if prompt == "x":
            raise HearthClientError("refused")
        return FakeStream(self._daemon.wait_s, options["max_tokens"])


Serve = Callable[[float], FakeDaemon]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def made(wait_s: float) -> FakeDaemon:
        daemon = FakeDaemon(wait_s)
        monkeypatch.setattr(toy_daemon, "AsyncClient", daemon.connect)
        return daemon

    return made


async def test_a_request_goes_at_its_time_whether_earlier_ones_have_ended_or_not(
    serve: Serve,
) -> None:
    daemon = serve(0.2)
    asks = [Ask(0.01 * number, 5, 3, "p") for number in range(CONNECTIONS + 1)]
    watched = await open_loop(SOCKET, asks)
    assert [one.ask for one in watched.seen] == asks
    for one, late in zip(watched.seen, watched.late, strict=True):
        assert one.due == pytest.approx(watched.began + one.ask.at)
        assert late >= 0
        # All were asked before the first was answered, unless this machine slept for long.
        assert one.first >= one.due + 0.2
        assert (one.tokens, one.ended, one.reason) == ([5, 6, 7], [1.0, 2.0, 2.0], "length")
    clients = [client for client, _ in daemon.asked]
    assert len(set(clients)) == CONNECTIONS
    assert clients[0] is clients[-1]
    assert daemon.asked[0][1] == {"max_tokens": 3, "ignore_eos": True, "timestamps": True}


async def test_clients_of_a_closed_loop_go_on_with_the_next_request(serve: Serve) -> None:
    daemon = serve(0.02)
    asks = [Ask(0.0, 5, number, "p") for number in (1, 2, 3)]
    watched = await closed_loop(SOCKET, asks, clients=2, seconds=0.5)
    assert len({client for client, _ in daemon.asked}) == 2
    tokens = [options["max_tokens"] for _, options in daemon.asked]
    assert tokens[:7] == [1, 2, 3, 1, 2, 3, 1]
    assert len(watched.seen) == len(daemon.asked)
    assert watched.late


async def test_a_refused_request_has_no_reason_for_its_end(serve: Serve) -> None:
    serve(0.0)
    watched = await open_loop(SOCKET, [Ask(0.0, 5, 3, "x"), Ask(0.0, 5, 3, "p")])
    assert [(one.reason, one.tokens) for one in watched.seen] == [
        ("", []),
        ("length", [5, 6, 7]),
    ]
