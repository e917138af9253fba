from typing import Any

import pytest

from tests.daemon.door.harness import BACKENDS

LOOPS: list[tuple[str, dict[str, Any]]] = [*(("asyncio", loop) for loop in BACKENDS), ("trio", {})]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Each event loop that a client runs in."""
    loop: tuple[str, dict[str, Any]] = request.param
    return loop
