from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import connections
from bench.connections import connected


async def test_every_client_has_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: list[object] = []

    @asynccontextmanager
    async def connect(address: Path) -> AsyncIterator[object]:
        assert address == Path("socket")
        open_now.append(object())
        yield open_now[-1]
        open_now.pop()

    monkeypatch.setattr(connections, "AsyncClient", connect)
    async with connected(Path("socket"), 3) as clients:
        assert clients == open_now
        assert len(set(clients)) == 3
    assert open_now == []
