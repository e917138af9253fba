"""The blocking side of a session: handshake, waiting, renewal and loss."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hearth_client.channel import Channel
from hearth_client.connection import Connection, Exchange
from hearth_client.errors import ClientClosed, ClientShared, ConnectionLost
from hearth_client.keys import ClientKeys
from hearth_client.pictures import Frame
from hearth_client.protocol import Request, Welcome
from hearth_client.session import Session

_FINALISER_S = 0.1
"""Longer than a finaliser in another thread holds a session."""


class BlockingSession(Session):
    """One session at a time with the daemon at `address`; a lost one is opened anew on demand."""

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None,
        connection: Connection,
        timeout: float | None,
        silence_s: float,
    ) -> None:
        super().__init__(address, keys, connection, timeout, silence_s)
        self._process = os.getpid()
        self._user = threading.RLock()
        self._inside = 0
        self._forgotten: deque[Exchange] = deque()

    def open(self) -> Welcome:
        """The welcome of the session that is open, or of a new one."""
        self._check_not_closed()
        with self._alone():
            while self._channel is not None and self._take():
                pass
            if self._channel is None:
                self._handshake()
        return self._opened()

    def request(self, build: Callable[[str], Request], frames: Sequence[Frame] = ()) -> Exchange:
        """Open the session if need be and send a request with the frames of its pictures."""
        with self._alone():
            self.open()
            exchange, data = self._connection.request(build, self._clock.now(), frames)
            self.send(data, frames)
        return exchange

    def send(self, data: bytes, frames: Sequence[Frame] = ()) -> None:
        """Send on the open session; does nothing when it is lost, as its requests have ended."""
        with self._alone():
            self._post(data, frames)

    def forget(self, exchange: Exchange) -> None:
        """End a generation without a reader; for finalisers, in any thread."""
        if not exchange.ended and not self._is_a_copy():
            self._forgotten.append(exchange)
            self._cancel_forgotten()

    def wait_for(self, exchange: Exchange) -> None:
        """Block until `exchange` has a delta or has ended."""
        since = self._clock.now()
        with self._alone():
            while not exchange.deltas and not exchange.ended:
                self.renew()
                self._send_cancels()
                if not self._take():
                    self._wait(max(since, self._last_answer) + self._silence_s)

    def renew(self) -> None:
        """Renew the lease when it is time; a reader that is always behind never waits."""
        renewal = self._connection.renewal(self._clock.now())
        if renewal is not None:
            self.send(renewal)

    def close(self) -> None:
        """End the session; open requests end with ClientClosed.

        In a process that was forked meanwhile it leaves the session to the one that opened it.
        """
        if self._is_a_copy():
            self._closed, self._channel = True, None
        with self._alone():
            self._closed = True
            self._lose(ClientClosed("this client was closed"), self._connection.farewell())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # A copy of a ZeroMQ socket has no thread that would carry its messages.
        if self._is_a_copy():
            raise ClientShared("another process opened this session: make a client for each one")
        # A ZeroMQ socket that two threads use at once ends the whole process.
        if not self._user.acquire(timeout=_FINALISER_S):
            raise ClientShared("another thread uses this client now: make one for each thread")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._user.release()
            self._cancel_forgotten()

    def _cancel_forgotten(self) -> None:
        """Cancel what was forgotten, unless the session is used now: its user does it at the end.

        A finaliser does not wait, and may come in the middle of a send of its own thread.
        """
        while self._forgotten and self._user.acquire(blocking=False):
            try:
                if self._inside:
                    return
                self._inside += 1
                try:
                    self._send_cancels()
                finally:
                    self._inside -= 1
            finally:
                self._user.release()

    def _send_cancels(self) -> None:
        while self._forgotten:
            exchange = self._forgotten.popleft()
            exchange.deltas.clear()
            message = self._connection.cancel(exchange)
            if message is not None:
                self._post(message)

    def _is_a_copy(self) -> bool:
        return self._channel is not None and self._process != os.getpid()

    def _handshake(self) -> None:
        limit = self._clock.now() + self._timeout
        self._process = os.getpid()
        self._channel = Channel(self._address, self._keys)
        self._channel.send(self._connection.hello())
        try:
            self._await_welcome(limit)
        except BaseException:
            # Also when interrupted: half a session must not look like an open one.
            self._lose(ConnectionLost("the session was not opened"))
            raise

    def _await_welcome(self, limit: float) -> None:
        while self._connection.welcome is None:
            if not self._take():
                self._wait(limit)
            if self._connection.failure is not None:
                raise self._connection.failure

    def _wait(self, limit: float) -> None:
        now = self._clock.now()
        if self._channel is None:
            return
        if now >= limit:
            self._lose(self._no_answer())
            return
        due = min(limit, self._connection.renew_at)
        self._channel.wait(min(due - now, self._clock.most_s))
