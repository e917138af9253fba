import os
from typing import Any

import anyio
import pytest

from hearth.daemon.door.front_door import Waker
from tests.daemon.door.harness import BACKENDS


@pytest.fixture(params=BACKENDS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", request.param


async def test_a_descriptor_rings_until_it_has_been_read() -> None:
    reading, writing = os.pipe()
    waker = Waker()
    waker.watch(reading)
    os.write(writing, b"x")
    await waker.wait(60)
    await waker.wait(60)
    os.read(reading, 1)
    waker.unwatch(reading)
    os.close(reading)
    os.close(writing)


async def test_a_ring_by_hand_is_kept_for_the_next_wait() -> None:
    waker = Waker()
    waker.wake()
    await waker.wait(60)
    with anyio.move_on_after(0.05) as waited:
        await waker.wait(60)
    assert waited.cancelled_caught


async def test_it_rings_when_the_time_is_up() -> None:
    await Waker().wait(0.01)
