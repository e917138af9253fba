import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.bench import toy_daemon
from hearth.bench.arrivals.clients import CONNECTIONS, closed_loop, open_loop
from hearth.bench.arrivals.ideal import Ask
from hearth_client import HearthClientError
from hearth_client.protocol import Delta, Done, Usage

SOCKET = Path("socket")


class FakeStream:
    """Two deltas of three tokens, once the daemon has had enough requests."""

    def __init__(self, daemon: "FakeDaemon", count: int) -> None:
        self.done: Done | None = None
        self._daemon = daemon
        self._count = count

    async def __aiter__(self) -> AsyncIterator[Delta]:
        await asyncio.sleep(0.005)
        await self._daemon.enough.wait()
        yield Delta(id="1", seq=0, text="a", tokens=[5], ended=1.0)
        yield Delta(id="1", seq=1, text="bc", tokens=[6, 7], ended=2.0)
        usage = Usage(prompt_tokens=5, completion_tokens=self._count)
        self.done = Done(id="1", reason="length", usage=usage)


class FakeDaemon:
    """It answers when it has `needed` requests, and tells who asked what; prompt "x" is refused."""

    def __init__(self, needed: int) -> None:
        self.enough = asyncio.Event()
        self._needed = needed
        self.asked: list[tuple[object, dict[str, Any]]] = []

    def ask(self, client: object, options: dict[str, Any]) -> None:
        self.asked.append((client, options))
        if len(self.asked) >= self._needed:
            self.enough.set()

    @asynccontextmanager
    async def connect(self, _: Path) -> AsyncIterator["FakeClient"]:
        yield FakeClient(self)


class FakeClient:
    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def generate(self, prompt: str, **options: Any) -> FakeStream:
        self._daemon.ask(self, options)
        if prompt == "x":
            raise HearthClientError("refused")
        return FakeStream(self._daemon, options["max_tokens"])


Serve = Callable[[int], FakeDaemon]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def made(needed: int) -> FakeDaemon:
        daemon = FakeDaemon(needed)
        monkeypatch.setattr(toy_daemon, "AsyncClient", daemon.connect)
        return daemon

    return made


async def test_a_request_goes_at_its_time_whether_earlier_ones_have_ended_or_not(
    serve: Serve,
) -> None:
    # The first is answered when the last was asked.
    daemon = serve(CONNECTIONS + 1)
    asks = [Ask(0.01 * number, 5, 3, "p") for number in range(CONNECTIONS + 1)]
    watched = await open_loop(SOCKET, asks)
    assert [one.ask for one in watched.seen] == asks
    for one, late in zip(watched.seen, watched.late, strict=True):
        assert one.due == pytest.approx(watched.began + one.ask.at)
        assert late >= 0
        assert one.first > one.due
        assert (one.tokens, one.ended, one.reason) == ([5, 6, 7], [1.0, 2.0, 2.0], "length")
    clients = [client for client, _ in daemon.asked]
    assert len(set(clients)) == CONNECTIONS
    assert clients[0] is clients[-1]
    asked = {"max_tokens": 3, "ignore_eos": True, "timestamps": True, "adapter": ""}
    assert daemon.asked[0][1] == asked


async def test_each_request_is_of_one_of_so_many_clients_by_chance(serve: Serve) -> None:
    senders = []
    for _ in range(2):
        daemon = serve(1)
        await open_loop(SOCKET, [Ask(0.0, 5, 3, "p")] * 40, clients=3)
        numbers: dict[object, int] = {}
        senders.append([numbers.setdefault(one, len(numbers)) for one, _ in daemon.asked])
    assert senders[0] == senders[1]
    assert set(senders[0]) == {0, 1, 2}
    assert senders[0] != [number % 3 for number in range(40)]


async def test_clients_of_a_closed_loop_go_on_with_the_next_request(serve: Serve) -> None:
    daemon = serve(1)
    asks = [Ask(0.0, 5, number, "p") for number in (1, 2, 3)]
    watched = await closed_loop(SOCKET, asks, clients=2, seconds=0.5)
    assert len({client for client, _ in daemon.asked}) == 2
    tokens = [options["max_tokens"] for _, options in daemon.asked]
    assert tokens[:7] == [1, 2, 3, 1, 2, 3, 1]
    assert len(watched.seen) == len(daemon.asked)
    assert watched.late


async def test_a_refused_request_has_no_reason_for_its_end(serve: Serve) -> None:
    serve(1)
    watched = await open_loop(SOCKET, [Ask(0.0, 5, 3, "x"), Ask(0.0, 5, 3, "p")])
    assert [(one.reason, one.tokens) for one in watched.seen] == [
        ("", []),
        ("length", [5, 6, 7]),
    ]
