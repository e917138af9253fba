"""Wakes the front door's one task: when a descriptor has news, when it is time, or by hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from typing_extensions import Self


class Bell:
    """Rung by descriptors that are readable; for one task, which reads them all before it waits.

    A descriptor that has not been read out rings on.
    """

    def __init__(self) -> None:
        self._rung = anyio.Event()
        self._watched: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in list(self._watched):
            self.unwatch(descriptor)

    def watch(self, descriptor: int) -> None:
        """Ring while `descriptor` is readable."""
        asyncio.get_running_loop().add_reader(descriptor, self.ring)
        self._watched.add(descriptor)

    def unwatch(self, descriptor: int) -> None:
        """Ring no more for `descriptor`, which is about to be closed."""
        self._watched.discard(descriptor)
        asyncio.get_running_loop().remove_reader(descriptor)

    def ring(self) -> None:
        """End the wait that goes on, or the next one."""
        self._rung.set()

    async def wait(self, seconds: float) -> None:
        """Wait until it rings, `seconds` at most."""
        timer = asyncio.get_running_loop().call_later(seconds, self.ring)
        try:
            await self._rung.wait()
        finally:
            timer.cancel()
        self._rung = anyio.Event()
