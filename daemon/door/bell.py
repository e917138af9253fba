"""Wakes the front door's one task: when a descriptor has news, when it is time, or by hand."""

import asyncio

import anyio


class Bell:
    """Rung by descriptors that are readable; for one task, which reads them all before it waits.

    A descriptor that has not been read out rings on.
    """

    def __init__(self) -> None:
        self._rung = anyio.Event()

    def watch(self, *descriptors: int) -> None:
        """Ring while one of them is readable."""
        for descriptor in descriptors:
            asyncio.get_running_loop().add_reader(descriptor, self.ring)

    def unwatch(self, *descriptors: int) -> None:
        """Ring no more for these, which are about to be closed."""
        for descriptor in descriptors:
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
