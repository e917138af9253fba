"""The sockets of the front door as one: the local one, and one on TCP where there are keys."""

from itertools import count

from hearth.actors.settings import Reloadable
from hearth.daemon.door.curve_socket import CurveSocket, open_port
from hearth.daemon.door.fair_queue import FairShares
from hearth.daemon.door.keys import Keys
from hearth.daemon.door.listener import Listener
from hearth.daemon.door.local_socket import LocalSocket
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import DoorSocket, Received, Sent
from hearth.runtime.errors import HearthError

_SOCKETS = 2


class DoorSockets:
    """Both share the time. Numbers of connections are even on the local one and odd on TCP."""

    def __init__(self, local: LocalSocket, tcp: CurveSocket | None = None) -> None:
        self.tcp = tcp
        self._local = local
        self._all: list[DoorSocket] = [local] if tcp is None else [local, tcp]
        self._costs = FairShares[int]()

    @property
    def descriptors(self) -> list[int]:
        """Implement DoorSocket."""
        return [descriptor for one in self._all for descriptor in one.descriptors]

    @property
    def pending(self) -> bool:
        """Implement DoorSocket."""
        return any(one.pending for one in self._all)

    @property
    def idle(self) -> bool:
        """Implement DoorSocket."""
        return all(one.idle for one in self._all)

    @property
    def overweight(self) -> int:
        """Connections that were closed since all took too much memory."""
        return self._local.overweight + (self.tcp.overweight if self.tcp else 0)

    def receive(self) -> Received | None:
        """Implement DoorSocket."""
        for number in sorted(range(len(self._all)), key=self._costs.of):
            received = self._all[number].receive()
            if received is not None:
                self._costs.begin(number)
                return received
        return None

    def charge(self, received: Received, seconds: float) -> None:
        """Implement DoorSocket."""
        number = received.connection % _SOCKETS
        self._costs.charge(number, seconds)
        self._all[number].charge(received, seconds)

    def full(self, connection: int) -> bool:
        """Implement DoorSocket."""
        return self._of(connection).full(connection)

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Implement DoorSocket."""
        return self._of(connection).send(connection, data, delimited=delimited)

    def session_began(self, connection: int) -> None:
        """Implement DoorSocket."""
        self._of(connection).session_began(connection)

    def session_ended(self, connection: int) -> None:
        """Implement DoorSocket."""
        self._of(connection).session_ended(connection)

    def take_closed(self) -> list[int]:
        """Implement DoorSocket."""
        return [connection for one in self._all for connection in one.take_closed()]

    def hung_up(self) -> list[int]:
        """Implement DoorSocket."""
        return [connection for one in self._all for connection in one.hung_up()]

    def tick(self, now: float) -> None:
        """Implement DoorSocket."""
        for one in self._all:
            one.tick(now)

    def close(self) -> None:
        """Implement DoorSocket."""
        for one in self._all:
            one.close()

    def _of(self, connection: int) -> DoorSocket:
        return self._all[connection % _SOCKETS]


def open_sockets(
    listener: Listener, settings: Reloadable[DoorSettings], keys: Keys | None
) -> DoorSockets:
    """The socket on `listener`, which it owns from now on, and with keys the one on TCP.

    Raises `socket_unusable` or `unsupported_option` where the port cannot be had.
    """
    local = LocalSocket(listener, settings, count(_SOCKETS, _SOCKETS))
    try:
        port = open_port(settings.current.tcp_port) if keys else None
        tcp = CurveSocket(port, settings, keys, count(1, _SOCKETS)) if port and keys else None
    except HearthError:
        local.close()
        raise
    return DoorSockets(local, tcp)
