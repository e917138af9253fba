"""A socket that clients talk to, as the front door sees it: receives and sends that never wait."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

Sent = Literal["sent", "full", "gone"]
ANSWERED_SIZE = 2
"""Frames up to this multiple of the limit are answered; who sends larger ones is left."""
FLUSH_S = 0.5
"""At the end, how long the last answers may take to leave."""


class Received(NamedTuple):
    """One message: who sent it, whether an empty delimiter came first, its first frame.

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
    """One of them; owned by one thread."""

    @property
    def descriptors(self) -> list[int]:
        """Tell of changes: drain `receive` before a wait for them, and after every `send`."""

    @property
    def pending(self) -> bool:
        """Whether `receive` gave None only for the sake of others: it is to be asked again."""

    @property
    def idle(self) -> bool:
        """Whether `tick` has nothing to do until a descriptor tells of news."""

    def receive(self) -> Received | None:
        """The next message, None when there is none now."""

    def charge(self, received: Received, seconds: float) -> None:
        """Count what a message has taken: those of who has cost the least are received first."""

    def full(self, connection: int) -> bool:
        """Tell whether it is known that `send` would find no room; to be asked before each."""

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Send one frame to a connection without waiting: it may be full, or gone."""

    def session_began(self, connection: int) -> None:
        """Keep a connection where others have to leave."""

    def session_ended(self, connection: int) -> None:
        """Keep it no longer."""

    def take_closed(self) -> list[int]:
        """Connections with sessions that have ended since the last call."""

    def hung_up(self) -> list[int]:
        """Connections whose peers have left, though not all that they said has been received."""

    def tick(self, now: float) -> None:
        """Close what is overdue by the door's running clock, in seconds; often while not idle."""

    def close(self) -> None:
        """Stop listening, and let the last answers leave."""
