"""Answers to sessions: sent at once, or kept until the client reads again."""

import msgspec
from hearth_client.protocol import Answer, Delta, Error
from hearth_client.running_clock import RunningClock

from actors.settings import Reloadable
from daemon.door.sessions import OpenRequest, Session
from daemon.door.settings import DoorSettings
from daemon.door.sockets import DoorSockets

_OUTBOX_ANSWERS = 1024
"""Answers that may wait for one client; more, and its session ends."""
_OUTBOX_BYTES = 16 << 20
"""The same for their bytes, which the end of what a slow client asked for should have kept."""


class Delivery:
    """Sends answers in order; notes whose clients are gone or do not read at all."""

    def __init__(
        self, socket: DoorSockets, settings: Reloadable[DoorSettings], clock: RunningClock
    ) -> None:
        self._socket = socket
        self._settings = settings
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._behind: dict[int, Session] = {}
        self._lost: dict[int, tuple[Session, str]] = {}

    @property
    def behind(self) -> list[Session]:
        """Sessions with answers that wait."""
        return list(self._behind.values())

    def take_lost(self) -> list[tuple[Session, str]]:
        """Sessions that answers no longer reach, and why; each is told of once."""
        lost, self._lost = list(self._lost.values()), {}
        return lost

    def reject(self, connection: int, error: Error, *, delimited: bool) -> None:
        """Answer a connection without a session, if it can be reached."""
        self._socket.send(connection, self._encoder.encode(error), delimited=delimited)

    def send(self, session: Session, answer: Answer) -> None:
        """Send an answer, behind those that wait."""
        if session.connection in self._lost:
            return
        waiting = session.outbox
        if not waiting and self._try(session, answer) != "full":
            return
        if len(waiting) >= _OUTBOX_ANSWERS or waiting.bytes > _OUTBOX_BYTES:
            self._lost[session.connection] = session, "slow_client"
            return
        waiting.add(answer, self._clock.now())
        self._behind[session.connection] = session

    def send_delta(self, request: OpenRequest, delta: Delta) -> None:
        """Send new text, numbered here, or let the delta of that request that waits grow."""
        if request.session.outbox.merge(delta):
            return
        delta.seq = request.next_seq
        request.next_seq += 1
        self.send(request.session, delta)

    @property
    def heaviest(self) -> Session | None:
        """The client for which the most waits, where too much waits for all together."""
        if (
            sum(one.outbox.bytes for one in self._behind.values())
            <= self._settings.current.unread_bytes
        ):
            return None
        return max(self._behind.values(), key=lambda one: one.outbox.bytes)

    def too_slow(self, session: Session) -> bool:
        """Whether a client's reading is beyond the bounds."""
        outbox = session.outbox
        if not outbox:
            return False
        blocked_s = self._clock.now() - outbox.blocked_since
        settings = self._settings.current
        return outbox.bytes > settings.slow_bytes or blocked_s > settings.slow_s

    def give_time(self, session: Session) -> None:
        """Count anew how long a client has not read."""
        session.outbox.blocked_since = self._clock.now()

    def flush(self, session: Session) -> None:
        """Send what waits, as far as the client takes it."""
        while (answer := session.outbox.head()) is not None:
            if self._try(session, answer) != "sent":
                return
            session.outbox.sent(self._clock.now())
        self._behind.pop(session.connection, None)

    def forget(self, session: Session) -> None:
        """Drop what waits for a session that has ended."""
        self._behind.pop(session.connection, None)

    def _try(self, session: Session, answer: Answer) -> str:
        # A long answer would be encoded in each turn, as long as its client does not read.
        if self._socket.full(session.connection):
            return "full"
        outcome = self._socket.send(
            session.connection, self._encoder.encode(answer), delimited=session.delimited
        )
        if outcome == "gone":
            self._lost[session.connection] = session, "gone"
        return outcome
