"""The ZeroMQ side of a client: one DEALER socket, and the events of its disconnection."""

import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from hearth_client.address import check_access
from hearth_client.errors import ConnectionTimeout
from hearth_client.keys import ClientKeys, secure
from hearth_client.pictures import Frame

_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 200
_FAREWELL_MS = 100


class Channel:
    """A connected DEALER with its own context; owned by one thread.

    Raises NotAllowed for a socket of others. One that is forgotten closes itself, and so does one
    that is left at the program's end: the collector would take the context before its sockets, and
    ZeroMQ wait for them for ever.
    """

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        check_access(address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if keys is not None:
            secure(self._socket, keys)
        self.refused: bool = False
        self.unmet: bool = False
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CLOSED
        )
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)
        # `finalize` clears references to what is forgotten, but not at the program's end.
        left = weakref.ref(self), threading.current_thread()
        self._forgotten = weakref.finalize(
            self, _close_forgotten, *left, self._socket, self._monitor, self._context
        )

    @property
    def descriptors(self) -> tuple[int, int]:
        """Edge-triggered descriptors of socket and monitor: drain both whenever one is readable."""
        return self._socket.FD, self._monitor.FD

    def send(self, data: bytes, frames: Sequence[Frame] = ()) -> None:
        """Queue one message; raises ConnectionTimeout when the daemon has stopped reading."""
        try:
            self._socket.send_multipart((data, *frames), zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionTimeout("the daemon does not take messages any more") from None

    def receive(self) -> bytes | None:
        """The next message, None when there is none now; frames after the first are dropped."""
        try:
            data = self._socket.recv(zmq.NOBLOCK)
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return data

    def disconnected(self) -> bool:
        """True if the connection broke since the last call; drain `receive` before.

        `refused` is set for good once the other side has refused the key: ZeroMQ then gives up.
        `unmet` is set where no connection could be made: ZeroMQ tries again.
        """
        broke = False
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return broke
            if event == zmq.EVENT_CLOSED:
                self.unmet = True
                continue
            broke = True
            self.refused = self.refused or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def wait(self, seconds: float) -> None:
        """Block until something comes, for `seconds` at most."""
        self._poller.poll(max(0, int(seconds * 1000) + 1))

    def close(self, last: bytes | None = None) -> None:
        """Close everything; unsent messages are dropped, but `last` gets a moment to leave."""
        self._forgotten.detach()
        self._socket.disable_monitor()
        self._monitor.close()
        if last is not None:
            with suppress(zmq.Again):
                self._socket.send(last, zmq.NOBLOCK)
        self._socket.close(linger=0 if last is None else _FAREWELL_MS)
        self._context.term()


def _close_forgotten(
    channel: weakref.ref[Channel],
    owner: threading.Thread,
    socket: zmq.Socket[bytes],
    monitor: zmq.Socket[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    warnings.warn("a client was not closed: use `with`, or close()", ResourceWarning, stacklevel=2)
    if channel() is not None and owner is not threading.current_thread() and owner.is_alive():
        return  # At the program's end another thread still reads, as a loop in a daemon thread.
    socket.disable_monitor()
    monitor.close()
    socket.close(linger=0)
    context.term()
