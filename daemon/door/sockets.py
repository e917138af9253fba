"""The sockets of the front door as one: the local one, and one on TCP where there are keys."""

from itertools import count

from daemon.door.curve_socket import CurveSocket, open_port
from daemon.door.keys import Keys
from daemon.door.listener import Listener
from daemon.door.settings import DoorSettings
from daemon.door.socket import DoorSocket, Received, Sent
from runtime.errors import HearthError

_SOCKETS = 2


class DoorSockets:
    """Both take turns. Numbers of connections are even on the local one and odd on TCP."""

    def __init__(self, local: DoorSocket, tcp: CurveSocket | None = None) -> None:
        self.tcp = tcp
        self._all = [local] if tcp is None else [local, tcp]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def descriptors(self) -> list[int]:
        """Tell of changes: drain `receive` before a wait for them, and after every `send`."""
        return [descriptor for one in self._all for descriptor in one.descriptors]

    def receive(self) -> Received | None:
        """The next message, None when there is none now."""
        for _ in self._all:
            number = self._turn
            self._turn = (number + 1) % len(self._all)
            received = self._all[number].receive()
            if received is not None:
                return received
        return None

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Send one frame to a connection without waiting: it may be full, or gone."""
        return self._all[self.number_of(connection)].send(connection, data, delimited=delimited)

    def number_of(self, connection: int) -> int:
        """Which socket a connection came by: 0 for the local one, 1 for TCP."""
        return connection % _SOCKETS

    def reopen(self, number: int) -> None:
        """Close all connections of one socket, and listen anew there."""
        self._all[number].reopen()

    def close(self) -> None:
        """Stop listening, and let the last answers leave."""
        for one in self._all:
            one.close()


def open_sockets(listener: Listener, settings: DoorSettings, keys: Keys | None) -> DoorSockets:
    """The socket on `listener`, which it owns from now on, and with keys the one on TCP.

    Raises `socket_unusable` or `unsupported_option` where the port cannot be had.
    """
    local = DoorSocket(listener, settings, count(0, _SOCKETS))
    try:
        port = open_port(settings.tcp_port) if keys else None
        tcp = CurveSocket(port, settings, keys, count(1, _SOCKETS)) if port and keys else None
    except HearthError:
        local.close()
        raise
    return DoorSockets(local, tcp)
