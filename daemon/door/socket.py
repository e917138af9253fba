"""A socket that clients talk to, as the front door sees it: receives and sends that never wait."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

Sent = Literal["sent", "full", "gone"]
ANSWERED_SIZE = 2
"""Multiple of the limit up to which frames are answered; larger ones end the connection."""
FLUSH_S = 0.5
"""Seconds that the last answers may take to leave at the end."""


class Received(NamedTuple):
    """One message: its connection, if an empty delimiter came first, its first frame.

    `connection` is a number that no other connection gets, whatever a client calls itself. `frames`
    counts all frames after the delimiter. Those behind the first are `pictures`, as they were
    received, and as many as one message may have. `peer` is who has connected: `uid:N` on the local
    socket, `key:PUBLICKEY` on TCP. `key` is the public key that the connection has shown, and
    `name` that of its owner; '' on the local socket.
    """

    connection: int
    delimited: bool
    data: bytes
    frames: int
    pictures: Sequence[memoryview] = ()
    peer: str = ""
    key: str = ""
    name: str = ""

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return len(self.data) + sum(len(one) for one in self.pictures)


class DoorSocket(Protocol):
    """A socket for clients, owned by one thread."""

    @property
    def descriptors(self) -> list[int]:
        """Descriptors to wait for: drain `receive` before a wait, and after every `send`."""

    @property
    def pending(self) -> bool:
        """True if `receive` gave None only for fairness: it has to be called again."""

    @property
    def idle(self) -> bool:
        """True if `tick` has nothing to do until a descriptor is readable."""

    def receive(self) -> Received | None:
        """The next message, None when there is none now."""

    def charge(self, received: Received, seconds: float) -> None:
        """Count a message's time for its sender: those that have cost less are received first."""

    def full(self, connection: int) -> bool:
        """True if `send` is known to find a full connection; to be called before each."""

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Send one frame to a connection without waiting: it may be full, or gone."""

    def session_began(self, connection: int) -> None:
        """Keep a connection where others are closed."""

    def session_ended(self, connection: int) -> None:
        """Let a connection be closed again where others are."""

    def take_closed(self) -> list[int]:
        """Connections with sessions that have ended since the last call."""

    def hung_up(self) -> list[int]:
        """Connections whose peers have left, even where messages of theirs are unread."""

    def tick(self, now: float) -> None:
        """Close what is overdue by the door's running clock, in seconds; often while not idle."""

    def close(self) -> None:
        """Stop listening, and let the last answers leave."""
