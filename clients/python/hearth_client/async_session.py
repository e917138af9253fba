"""The side of a session for asyncio and trio: the loop reads, tasks wait for their requests."""

import asyncio
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from hearth_client.channel import Channel
from hearth_client.connection import Connection, Exchange
from hearth_client.errors import ClientClosed, ClientShared, ConnectionLost, HearthClientError
from hearth_client.keys import ClientKeys
from hearth_client.pictures import Frame
from hearth_client.protocol import Request, Welcome
from hearth_client.session import Session

if TYPE_CHECKING:
    from hearth_client.trio_loop import TrioFuture, TrioLoop

_BURST = 64
"""Messages taken in before other callbacks of the loop get their turn."""
_WELCOME = "welcome"


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None:
        """Call no more."""


def _running_loop() -> "asyncio.AbstractEventLoop | TrioLoop":
    # trio first, as it may be a guest in a loop of asyncio.
    if "trio" in sys.modules:
        from hearth_client.trio_loop import TrioLoop  # noqa: PLC0415 - not everybody has trio

        with suppress(RuntimeError):
            return TrioLoop()
    return asyncio.get_running_loop()


class AsyncSession(Session):
    """One session at a time with the daemon at `address`; a lost one is opened anew on demand.

    Everything happens in callbacks of the loop, so a cancelled task loses no message.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None,
        connection: Connection,
        timeout: float | None,
        silence_s: float,
    ) -> None:
        super().__init__(address, keys, connection, timeout, silence_s)
        self._opening = False
        self._waiters: dict[Hashable, asyncio.Future[None] | TrioFuture] = {}
        # Those of the newest handshake; there is nothing to call before the first.
        self._loop: asyncio.AbstractEventLoop | TrioLoop
        self._timer: Timer

    async def open(self) -> Welcome:
        """The welcome of the session that is open, or of a new one."""
        while self._opening:
            await self._wait(object())
        self._check_not_closed()
        self._check_loop()
        if self._channel is None:
            self._opening = True
            try:
                await self._handshake()
            finally:
                self._opening = False
                self._wake(*self._waiters)
        return self._opened()

    async def request(
        self, build: Callable[[str], Request], frames: Sequence[Frame] = ()
    ) -> Exchange:
        """Open the session if need be and send a request with the frames of its pictures."""
        await self.open()
        exchange, data = self._connection.request(build, self._clock.now(), frames)
        self.send(data, frames)
        return exchange

    def send(self, data: bytes, frames: Sequence[Frame] = ()) -> None:
        """Send on the open session; does nothing when it is lost, as its requests have ended."""
        self._post(data, frames)
        # A send takes the wake-up of messages that came meanwhile.
        self._readable()

    async def wait_for(self, exchange: Exchange) -> None:
        """Wait until `exchange` has a delta or has ended; raises ClientShared for a second task."""
        self._check_loop()
        if exchange.id in self._waiters:
            raise ClientShared("another task reads this generation")
        while not exchange.deltas and not exchange.ended:
            await self._wait(exchange.id)

    def forget(self, exchange: Exchange) -> None:
        """End a generation without a reader; for finalisers, in any thread."""
        if not exchange.ended:
            # Later, as this may come in the middle of a send; and not in a loop that is closed.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel_forgotten, exchange)

    def forget_later(self, exchange: Exchange, seconds: float) -> Timer | None:
        """End a generation in so many seconds unless the timer is cancelled before."""
        # Not by a callback that holds its reader: one that is forgotten ends at once.
        with suppress(RuntimeError):
            return self._loop.call_later(seconds, self.forget, exchange)
        return None  # In a loop that is closed.

    def close(self) -> None:
        """End the session; open requests end with ClientClosed."""
        self._closed = True
        self._lose(ClientClosed("this client was closed"), self._connection.farewell())

    def _check_loop(self) -> None:
        # The loop that opened the session reads for it: in another one nothing would ever come.
        if self._channel is not None and self._loop != _running_loop():
            raise ClientShared("another loop opened this session: make a client for each one")

    def _cancel_forgotten(self, exchange: Exchange) -> None:
        exchange.deltas.clear()
        self.cancel(exchange)

    async def _wait(self, key: Hashable) -> None:
        """Wait until `key` is woken, or all are."""
        self._waiters[key] = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiters.pop(key, None)

    async def _handshake(self) -> None:
        self._loop = loop = _running_loop()
        self._channel = Channel(self._address, self._keys)
        self._timer = loop.call_later(self._timeout, self._give_up)
        for descriptor in self._channel.descriptors:
            loop.add_reader(descriptor, self._readable)
        self.send(self._connection.hello())
        try:
            while self._connection.welcome is None and self._connection.failure is None:
                await self._wait(_WELCOME)
        except BaseException:
            self._lose(ConnectionLost("the session was not opened"))
            raise
        if self._connection.failure is not None:
            raise self._connection.failure
        self._last_answer = self._clock.now()
        self._timer.cancel()
        self._arm()

    def _give_up(self) -> None:
        if self._connection.welcome is None:
            self._lose(self._no_answer())

    def _readable(self) -> None:
        for _ in range(_BURST):
            if not self._take():
                return
        self._loop.call_soon(self._readable)

    def _arrived(self, exchange: Exchange | None) -> None:
        super()._arrived(exchange)
        if exchange is not None:
            self._wake(exchange.id)
        elif self._connection.welcome is not None:
            self._wake(_WELCOME)

    def _arm(self) -> None:
        due = min(self._connection.renew_at, self._last_answer + self._silence_s)
        wait_s = min(due - self._clock.now(), self._clock.most_s)
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _tick(self) -> None:
        # Answers that came while the loop was busy elsewhere end the silence.
        self._readable()
        if self._channel is None:
            return
        now = self._clock.now()
        if now - self._last_answer >= self._silence_s:
            self._lose(self._no_answer())
            return
        renewal = self._connection.renewal(now)
        if renewal is not None:
            self.send(renewal)
        if self._channel is not None:
            self._arm()

    def _lose(self, error: HearthClientError, last: bytes | None = None) -> None:
        if self._channel is not None:
            self._timer.cancel()
            for descriptor in self._channel.descriptors:
                with suppress(RuntimeError):  # A loop that is closed watches nothing.
                    self._loop.remove_reader(descriptor)
        super()._lose(error, last)
        self._wake(*self._waiters)

    def _wake(self, *keys: Hashable) -> None:
        for key in keys:
            waiter = self._waiters.get(key)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
