"""Base of blocking and asynchronous sessions: message intake and detection of loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hearth_client.address import absence
from hearth_client.channel import Channel
from hearth_client.connection import RENEWALS, Connection, Exchange
from hearth_client.errors import (
    ClientClosed,
    ConnectionLost,
    ConnectionRefused,
    ConnectionTimeout,
    HearthClientError,
    InvalidValue,
    NotAllowed,
)
from hearth_client.keys import ClientKeys
from hearth_client.pictures import Frame
from hearth_client.protocol import Welcome
from hearth_client.running_clock import RunningClock

_TIMEOUT_S = 5.0


class Session(ABC):
    """One session at a time with the daemon at `address`; a lost one is opened anew on demand.

    A daemon that is not there is waited for, for `timeout` seconds, where the caller has named
    them; otherwise one that was met and has gone away, for as long from then on.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None,
        connection: Connection,
        timeout: float | None,
        silence_s: float,
    ) -> None:
        if not silence_s > 0:
            raise InvalidValue(f"silence_s is above 0, not {silence_s}", "silence_s")
        if timeout is not None and not timeout >= 0:
            raise InvalidValue(f"timeout is 0 or above, not {timeout}", "timeout")
        self._address = address
        self._keys = keys
        self._connection = connection
        self._timeout = _TIMEOUT_S if timeout is None else timeout
        self._awaited_until = 0.0 if timeout is None else float("inf")
        self._silence_s = silence_s
        self._clock = RunningClock(silence_s / RENEWALS)
        self._channel: Channel | None = None
        self._last_answer = 0.0
        self._closed = False

    @abstractmethod
    def send(self, data: bytes, frames: Sequence[Frame] = ()) -> None:
        """Send on the open session; does nothing when it is lost, as its requests have ended."""

    def cancel(self, exchange: Exchange) -> None:
        """Ask the daemon to end a generation; does nothing when it has ended."""
        message = self._connection.cancel(exchange)
        if message is not None:
            self.send(message)

    @abstractmethod
    def forget(self, exchange: Exchange) -> None:
        """End a generation without a reader; for finalisers, in any thread."""

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ClientClosed("this client was closed: make another one")

    def _opened(self) -> Welcome:
        if self._connection.welcome is None:
            raise ConnectionLost("the session was lost while it was opened")
        return self._connection.welcome

    def _post(self, data: bytes, frames: Sequence[Frame] = ()) -> None:
        try:
            if self._channel is not None:
                self._channel.send(data, frames)
        except ConnectionTimeout as error:
            self._lose(error)

    def _take(self) -> bool:
        """Take in one message or a disconnection; False when there is neither."""
        if self._channel is None:
            return False
        data = self._channel.receive()
        if data is not None:
            self._last_answer = self._clock.now()
            self._arrived(self._connection.receive(data, self._last_answer))
            if (again := self._connection.hello_again()) is not None:
                self._post(again)
            return True
        if not self._channel.disconnected():
            unmet, self._channel.unmet = self._channel.unmet, False
            return unmet and self._no_daemon()
        if self._channel.refused:
            text = f"the daemon at {self._address} does not list this key: its owner says"
            self._lose(NotAllowed(f"{text} `hearth keys add`, and `hearth reload`"))
        elif self._connection.welcome is None:
            # Whoever listened is gone and cannot have kept the first hello.
            self._post(self._connection.hello())
        else:
            self._lose(ConnectionLost("the daemon closed the connection"))
        return True

    def _arrived(self, _exchange: Exchange | None) -> None:
        """A message was taken in, for that request or for the session."""
        if self._connection.failure is not None:
            self._lose(self._connection.failure)

    def _no_daemon(self) -> bool:
        """Lose a session without a daemon, unless its start is to be waited for; True if lost."""
        if self._connection.welcome is not None or self._clock.now() < self._awaited_until:
            return False
        reason = absence(self._address)
        if reason:
            text = f"no daemon listens at {self._address} ({reason}): start one with `hearth serve`"
            self._lose(ConnectionRefused(f"{text}, or give a timeout to wait for it"))
        return bool(reason)

    def _no_answer(self) -> ConnectionTimeout:
        if self._keys is not None:
            return ConnectionTimeout(
                f"no answer from a daemon at {self._address}: does `hearth serve` run there with "
                "tcp_port, and is server_key its public key?"
            )
        return ConnectionTimeout(
            f"no answer from a daemon at {self._address}: is `hearth serve` running?"
        )

    def _lose(self, error: HearthClientError, last: bytes | None = None) -> None:
        channel, self._channel = self._channel, None
        if channel is not None and self._connection.welcome is not None:
            self._awaited_until = max(self._awaited_until, self._clock.now() + self._timeout)
        self._connection.lose(error)
        if channel is not None:
            channel.close(last)
