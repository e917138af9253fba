"""Base of both clients' generations: the text and tokens collected so far."""

import weakref
from copy import copy
from typing import Generic, TypeVar

from hearth_client.connection import Exchange
from hearth_client.errors import ProtocolViolation
from hearth_client.protocol import Accepted, Delta, Done
from hearth_client.session import Session

SessionT = TypeVar("SessionT", bound=Session)


class Collected(Generic[SessionT]):
    """Answers of one generation, as taken by its reader; forgotten before its end it is cancelled.

    A failure has the text so far as its `text`.
    """

    def __init__(self, session: SessionT, exchange: Exchange) -> None:
        self.tokens: list[int] = []
        self._session = session
        self._exchange = exchange
        self._parts: list[str] = []
        # At the end of the program the daemon gets notice of the client's own.
        weakref.finalize(self, session.forget, exchange).atexit = False

    @property
    def id(self) -> str:
        """The request's id on its connection."""
        return self._exchange.id

    @property
    def accepted(self) -> Accepted | None:
        """The daemon's notice that the request is queued, with the prompt's length in tokens."""
        return self._exchange.accepted

    @property
    def request(self) -> str:
        """The request's id in the daemon's logs and traces; empty until it is accepted."""
        return self._exchange.accepted.request if self._exchange.accepted else ""

    @property
    def done(self) -> Done | None:
        """Reason and usage; None before the end, and after a failure."""
        return self._exchange.done

    def cancel(self) -> None:
        """Ask the daemon to end this generation; the stream then ends with reason `cancelled`."""
        self._session.cancel(self._exchange)

    def _take(self) -> Delta | None:
        """The next delta that has arrived; raises the request's error after the last one."""
        if self._exchange.deltas:
            delta = self._exchange.deltas.popleft()
            self._parts.append(delta.text)
            self.tokens.extend(delta.tokens)
            return delta
        if self._exchange.error is not None:
            # One loss ends several generations, each with a text of its own.
            error = copy(self._exchange.error)
            error.text = "".join(self._parts)
            raise error
        return None

    def _result(self) -> Done:
        if self._exchange.done is None:
            raise ProtocolViolation("the generation has ended without a word of how")
        return self._exchange.done
