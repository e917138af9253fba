"""The ROUTER on TCP: this machine's own address, CURVE, and none but the keys that are listed."""

import os
import socket
from collections.abc import Iterator, Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from daemon.connections import LOOPBACK, listen_on_port
from daemon.door.keys import Keys
from daemon.door.settings import DoorSettings
from daemon.door.socket import DoorSocket, Received
from daemon.door.zap import DOMAIN, Zap
from runtime.errors import HearthError

_OLDEST = (4, 3, 3)
"""Before, peers without a key can do harm: CVE-2019-13132 and CVE-2020-15166."""
_BURST = 64
_MONITOR = "inproc://handshakes"


class Port:
    """A listening port of this machine alone, as a DoorSocket takes it."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self.number: int = listening.getsockname()[1]
        self.endpoint = f"tcp://{LOOPBACK}:{self.number}"

    def duplicate(self) -> int:
        """Another descriptor of the listening socket, for an owner who closes it."""
        return os.dup(self._listening.fileno())

    def close(self) -> None:
        """Give up the port."""
        self._listening.close()


def open_port(number: int) -> Port:
    """Listen on a port, 0 for any; raises `socket_unusable`, or `unsupported_option`."""
    check_library(zmq.zmq_version_info(), curve=zmq.has("curve"))
    return Port(listen_on_port(number, "tcp_port"))


def check_library(version: tuple[int, int, int], *, curve: bool) -> None:
    """Raise `unsupported_option` for a libzmq that is not to be reached over TCP."""
    if version < _OLDEST or not curve:
        is_ = ".".join(map(str, version)) + ("" if curve else " without CURVE")
        text = f"tcp_port needs libzmq 4.3.3 or newer, built with CURVE, and this is {is_}"
        raise HearthError("unsupported_option", f"{text}: install another pyzmq", "tcp_port")


class CurveSocket(DoorSocket):
    """As its base; what it receives says whose it is. A key that is taken off is heard no more."""

    def __init__(
        self, port: Port, settings: DoorSettings, keys: Keys, numbers: Iterator[int]
    ) -> None:
        self.port = port.number
        self._secret = keys.secret
        self._clients = keys.clients
        self._refused = 0
        self._connections = 0
        self._handshakes = 0
        super().__init__(port, settings, numbers)

    @property
    def descriptors(self) -> list[int]:
        """Those of its base, and of the questions who may connect."""
        return [*super().descriptors, self._zap.descriptor]

    def allow(self, clients: Mapping[str, str]) -> None:
        """Let those in from now on, names by public keys, and no others."""
        self._clients = clients

    def receive(self) -> Received | None:
        """The next message of a client that is listed, None when there is none now."""
        self._refused += self._zap.answer(self._clients)
        for _ in range(_BURST):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            rest = self._rest()
            key = str(frame.get("User-Id"))
            name = self._clients.get(key)
            if name is not None:
                connection, peer = self._known.get(frame.bytes) or self._know(frame)
                return Received(connection, *rest, peer, key, name)
            self._refused += 1
        return None

    def take_counts(self) -> tuple[int, int, int]:
        """Since the last call: connections, those that had a listed key, and what was refused."""
        self._look()
        counts = self._connections, self._handshakes, self._refused
        self._connections = self._handshakes = self._refused = 0
        return counts

    def _peer(self, frame: zmq.Frame) -> str:
        return f"key:{frame.get('User-Id')}"

    def _look(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            self._connections += event == zmq.EVENT_ACCEPTED
            self._handshakes += event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _prepare(self) -> None:
        self._zap = Zap(self._context)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without it whoever comes while nobody answers is let in.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.monitor(_MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._monitor = self._context.socket(zmq.PAIR)
        # ZeroMQ's thread would wait for room in it, and the end of the socket for that thread.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(_MONITOR)

    def _shut(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._look()
        self._monitor.close(linger=0)
        self._zap.close()
        super()._shut(linger_ms)
