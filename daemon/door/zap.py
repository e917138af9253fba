"""Who may connect: the answers to ZeroMQ's own question, by its protocol ZAP (RFC 27)."""

from collections.abc import Container

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"hearth"
_VERSION = b"1.0"
_FRAMES = 7
_KEY_BYTES = 32
_BURST = 64


class Zap:
    """The handler of one context. ZeroMQ asks once for each connection that shows a CURVE key.

    A key that is let in is the `User-Id` of all that comes from there.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)

    @property
    def descriptor(self) -> int:
        """Tells of changes, as a door's does."""
        return self._socket.FD

    def answer(self, listed: Container[str]) -> int:
        """Answer what is asked now, up to a bound; how many were refused."""
        refused = 0
        for _ in range(_BURST):
            try:
                asked = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            key = _key_of(asked)
            allowed = key in listed
            refused += not allowed
            outcome = [b"200", b"OK", key.encode()] if allowed else [b"400", b"not listed", b""]
            number = asked[1] if len(asked) > 1 else b""
            self._socket.send_multipart([_VERSION, number, *outcome, b""], zmq.NOBLOCK)
        return refused

    def close(self) -> None:
        """Let nobody in from now on."""
        self._socket.close()


def _key_of(asked: list[bytes]) -> str:
    """The public key that a question is about; '' for one of another form."""
    # Version, number, domain, address, identity, mechanism and what it shows.
    if len(asked) != _FRAMES or asked[0] != _VERSION or asked[5] != b"CURVE":
        return ""
    return z85.encode(asked[6]).decode() if len(asked[6]) == _KEY_BYTES else ""
