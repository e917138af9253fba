"""ZAP handler: answers ZeroMQ's requests which clients may connect (RFC 27)."""

import time
from collections.abc import Callable, Container

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"hearth"
BURST = 32
"""Connections that one key may open at once; then one a second."""
_LONGEST_S = 3600.0
_VERSION = b"1.0"
_FRAMES = 7
_KEY_BYTES = 32
_TURN = 64


class Zap:
    """The handler of one context. ZeroMQ asks once for each connection that shows a CURVE key.

    An admitted key is the `User-Id` of all that comes from there. `admitted` counts those that
    were. A key that comes too often has to retry later, so that no peer can use up routing ids.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admitted = 0
        self._clock = clock
        self._full_at: dict[str, float] = {}
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
        for _ in range(_TURN):
            try:
                asked = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            key = _key_of(asked)
            if key not in listed:
                refused += 1
                outcome = [b"400", b"not listed", b""]
            elif not self._in_time(key):
                # By 300 the connection is closed without an error, and the client tries again.
                outcome = [b"300", b"too often", b""]
            else:
                self.admitted += 1
                outcome = [b"200", b"OK", key.encode()]
            number = asked[1] if len(asked) > 1 else b""
            self._socket.send_multipart([_VERSION, number, *outcome, b""], zmq.NOBLOCK)
        return refused

    def put_off(self, key: str) -> None:
        """Let a key wait as long as after a burst: an answer may have revealed something to it."""
        now = self._clock()
        self._full_at[key] = min(max(self._full_at.get(key, now), now) + BURST, now + _LONGEST_S)

    def close(self) -> None:
        """Refuse all from now on."""
        self._socket.close()

    def _in_time(self, key: str) -> bool:
        """Tell whether a key has not opened too many connections of late; it opens one more."""
        now = self._clock()
        # When it may again open as many as it likes: each puts that off by a second.
        full_at = max(self._full_at.get(key, now), now) + 1.0
        if full_at > now + BURST:
            return False
        self._full_at[key] = full_at
        return True


def _key_of(asked: list[bytes]) -> str:
    """The public key that a question is about; '' for one of another form."""
    # Version, number, domain, address, identity, mechanism and what it shows.
    if len(asked) != _FRAMES or asked[0] != _VERSION or asked[5] != b"CURVE":
        return ""
    return z85.encode(asked[6]).decode() if len(asked[6]) == _KEY_BYTES else ""
