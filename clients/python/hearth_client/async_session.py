"""The asyncio side of a session: the loop reads for it, tasks wait for their requests."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from hearth_client.channel import Channel
from hearth_client.connection import Connection, Exchange
from hearth_client.errors import ClientClosed, ClientShared, ConnectionLost, HearthClientError
from hearth_client.keys import ClientKeys
from hearth_client.pictures import Frame
from hearth_client.protocol import Request, Welcome
from hearth_client.session import Session

_BURST = 64
"""Messages taken in before other callbacks of the loop get their turn."""


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
        self._opening = asyncio.Lock()
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._welcomed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> Welcome:
        """The welcome of the session that is open, or of a new one."""
        async with self._opening:
            self._check_not_closed()
            self._check_loop()
            if self._channel is None:
                await self._handshake()
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
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[exchange.id] = waiter
            try:
                await waiter
            finally:
                self._waiters.pop(exchange.id, None)

    def forget(self, exchange: Exchange) -> None:
        """End a generation without a reader; for finalisers, in any thread."""
        if not exchange.ended and self._loop is not None:
            # Later, as this may come in the middle of a send; and not in a loop that is closed.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel_forgotten, exchange)

    def close(self) -> None:
        """End the session; open requests end with ClientClosed."""
        self._closed = True
        self._lose(ClientClosed("this client was closed"), self._connection.farewell())

    def _check_loop(self) -> None:
        # The loop that opened the session reads for it: in another one nothing would ever come.
        if self._channel is not None and self._loop is not asyncio.get_running_loop():
            raise ClientShared("another loop opened this session: make a client for each one")

    def _cancel_forgotten(self, exchange: Exchange) -> None:
        exchange.deltas.clear()
        self.cancel(exchange)

    async def _handshake(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._welcomed = loop.create_future()
        self._channel = Channel(self._address, self._keys)
        for descriptor in self._channel.descriptors:
            loop.add_reader(descriptor, self._readable)
        self.send(self._connection.hello())
        try:
            await asyncio.wait_for(self._welcomed, self._timeout)
        except asyncio.TimeoutError:
            self._lose(self._no_answer())
        except BaseException:
            self._lose(ConnectionLost("the session was not opened"))
            raise
        if self._connection.failure is not None:
            raise self._connection.failure
        self._last_answer = self._clock.now()
        self._arm()

    def _readable(self) -> None:
        for _ in range(_BURST):
            if not self._take():
                return
        asyncio.get_running_loop().call_soon(self._readable)

    def _arrived(self, exchange: Exchange | None) -> None:
        super()._arrived(exchange)
        if exchange is not None:
            self._resolve(self._waiters.get(exchange.id))
        elif self._connection.welcome is not None:
            self._resolve(self._welcomed)

    def _arm(self) -> None:
        due = min(self._connection.renew_at, self._last_answer + self._silence_s)
        wait_s = min(due - self._clock.now(), self._clock.most_s)
        self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._tick)

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
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in self._channel.descriptors if self._channel is not None else ():
            asyncio.get_running_loop().remove_reader(descriptor)
        super()._lose(error, last)
        for waiter in [self._welcomed, *self._waiters.values()]:
            self._resolve(waiter)

    @staticmethod
    def _resolve(waiter: "asyncio.Future[None] | None") -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
