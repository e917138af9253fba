"""The part of asyncio's loop that a session needs, for trio."""

from collections.abc import Callable, Generator
from typing import Any

import trio

Callback = Callable[..., object]


class TrioFuture:
    """An event that is awaited as a future of asyncio is."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def done(self) -> bool:
        """True once it has a result."""
        return self._event.is_set()

    def set_result(self, _result: None) -> None:
        """Wake who waits."""
        self._event.set()

    def __await__(self) -> Generator[Any, None, None]:
        return self._event.wait().__await__()


class TrioLoop:
    """Callbacks by system tasks of the run that this is made in; RuntimeError outside of a task.

    trio cancels system tasks at the end of its run, as asyncio drops the callbacks of a loop.
    """

    def __init__(self) -> None:
        trio.lowlevel.current_task()
        self._token = trio.lowlevel.current_trio_token()
        self._readers: dict[int, trio.CancelScope] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrioLoop) and other._token is self._token

    def __hash__(self) -> int:
        return hash(self._token)

    def create_future(self) -> TrioFuture:
        """A future without a result."""
        return TrioFuture()

    def call_soon(self, callback: Callback, *args: object) -> None:
        """Call back behind what waits for its turn; in any thread, RuntimeError after the run."""
        self._token.run_sync_soon(callback, *args)

    call_soon_threadsafe = call_soon

    def call_later(self, seconds: float, callback: Callback, *args: object) -> trio.CancelScope:
        """Call back in so many seconds, or soon; not if what is returned is cancelled before."""
        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await trio.sleep(max(seconds, 0.0))
                callback(*args)

        trio.lowlevel.spawn_system_task(wait, name=callback)
        return scope

    def add_reader(self, descriptor: int, callback: Callback) -> None:
        """Call back whenever the descriptor is readable."""
        scope = self._readers[descriptor] = trio.CancelScope()

        async def watch() -> None:
            with scope:
                # One that is removed may be closed already.
                while not scope.cancel_called:
                    await trio.lowlevel.wait_readable(descriptor)
                    callback()

        trio.lowlevel.spawn_system_task(watch, name=callback)

    def remove_reader(self, descriptor: int) -> None:
        """Watch a descriptor no more; it may be closed then."""
        self._readers.pop(descriptor).cancel()
