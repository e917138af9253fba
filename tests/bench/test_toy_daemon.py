from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hearth.bench import toy_daemon
from hearth.bench.toy_daemon import connected, given_or_toy
from hearth.runtime.config import load_config


async def test_every_client_has_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: list[object] = []

    @asynccontextmanager
    async def connect(address: Path) -> AsyncIterator[object]:
        assert address == Path("socket")
        open_now.append(object())
        yield open_now[-1]
        open_now.pop()

    monkeypatch.setattr(toy_daemon, "AsyncClient", connect)
    async with connected(Path("socket"), 3) as clients:
        assert clients == open_now
        assert len(set(clients)) == 3
    assert open_now == []


def test_a_toy_stands_in_where_no_engine_is_given(tmp_path: Path) -> None:
    with given_or_toy(tmp_path) as engine:
        assert engine == tmp_path
    with given_or_toy() as engine:
        assert load_config(engine).max_kv_cache_capacity == 2048
    assert not engine.exists()
