"""The ROUTER on TCP: this machine's own address, CURVE, and none but the keys that are listed."""

import ctypes
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from hearth.actors.settings import Reloadable
from hearth.daemon.connections import LOOPBACK, listen_on_port
from hearth.daemon.door.fair_queue import FairQueue
from hearth.daemon.door.keys import Keys
from hearth.daemon.door.local_socket import STRANGERS
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import ANSWERED_SIZE, FLUSH_S, Received, Sent
from hearth.daemon.door.zap import DOMAIN, Zap
from hearth.runtime.errors import HearthError
from hearth_client.protocol import Error


def memory_of_process() -> int:
    """Bytes in RAM of this process that are no file's; 0 where the system does not tell."""
    try:
        resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


class Growth:
    """Growth of the process since the first measurement."""

    def __init__(self, look: Callable[[], int] = memory_of_process) -> None:
        self._look = look
        self._start = look()

    def exceeds(self, most: int) -> bool:
        """Tell whether it is more than `most` bytes; 0 is no bound."""
        return bool(most) and self._look() - self._start > most

    def forgive(self) -> None:
        """Count from what is in use now, if that is more: the process uses it again."""
        self._start = max(self._start, self._look())


_log = structlog.get_logger("hearth.door")
_OLDEST = (4, 3, 3)
"""First safe release of libzmq: peers without a key can harm older ones by CVE-2019-13132 and
CVE-2020-15166."""
_BURST = 64
_HELD = 64
_HELD_BYTES = 4 << 20
"""Messages that may wait here, as ZeroMQ does not say whose is next."""
_FRAMES = 1024
"""Limit of the frames of one message, beside its pictures, and of the frames read in one go."""
_MONITOR = "inproc://handshakes"
_FIRST = "inproc://first"
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_SILENT_S = 10.0
"""Seconds that a connection may go without a valid message."""
_ID_BYTES = 5
_IDS = 1 << 32
_NAMED = msgspec.msgpack.encode(
    Error(
        code="unsupported_option",
        field="routing_id",
        message="leave the routing id unset: over TCP a connection that chooses one is not heard",
    )
)


class Port:
    """A listening port of this machine alone."""

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


@dataclass(slots=True, eq=False)
class _Connection:
    """One peer, by the descriptor that ZeroMQ has for it; `number` is 0 until its first message.

    A peer that has sent no valid message at `until` is closed.
    """

    descriptor: int
    until: float
    number: int = 0
    routing_id: bytes = b""
    key: str = ""
    session: bool = False


class CurveSocket:
    """A ROUTER in mandatory mode on a port, which it owns; messages of a removed key are dropped.

    Connections go by the routing ids that ZeroMQ itself gives them, each once, from a secret number
    on. It also takes what a peer calls itself, and ends the process when its own count comes there:
    so a peer that chooses an id is answered with an error and closed, and keys open connections at
    a rate that SECURITY.md reckons with.
    """

    def __init__(
        self, port: Port, settings: Reloadable[DoorSettings], keys: Keys, numbers: Iterator[int]
    ) -> None:
        self.port = port.number
        self.overweight = 0
        self.pending = False
        self._turns = FairQueue[Received]()
        self._held = self._held_bytes = 0
        self._skips = False
        self._listener = port
        self._numbers = numbers
        self._settings = settings
        self._pictures = settings.current.images_per_request
        self._clients = keys.clients
        self._refused = 0
        self._accepted = 0
        self._handshakes = 0
        self._now = 0.0
        self._growth = Growth()
        self._connections: dict[int, _Connection] = {}
        self._by_routing_id: dict[bytes, _Connection] = {}
        self._by_number: dict[int, _Connection] = {}
        self._closed: list[int] = []
        self._context = zmq.Context()
        # ZeroMQ takes its first routing id from there, and nothing else has given it a seed.
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _options(settings.current).items():
            self._socket.setsockopt(option, value)
        self._first = self._first_id()
        self._zap = Zap(self._context)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without it a peer that connects while no handler answers is admitted.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.monitor(_MONITOR, _EVENTS)
        self._monitor = self._context.socket(zmq.PAIR)
        # ZeroMQ's thread would wait for room in it, and the end of the socket for that thread.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(_MONITOR)
        self._socket.setsockopt(zmq.USE_FD, port.duplicate())
        self._socket.bind(port.endpoint)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of messages, of ZAP requests, and of connect and disconnect events."""
        return [self._socket.FD, self._zap.descriptor, self._monitor.FD]

    @property
    def idle(self) -> bool:
        """True while no connection is open, for which ZeroMQ could take memory."""
        return not self._connections

    def allow(self, clients: Mapping[str, str]) -> None:
        """Admit these clients from now on, names by public keys; all others are dropped."""
        self._clients = clients

    def receive(self) -> Received | None:
        """The next message of a listed client, None when there is none now.

        Its sender has cost the least among those whose messages can be held here.
        """
        while True:
            self._hold()
            received = self._turns.take()
            if received is None:
                return None
            self._held -= 1
            self._held_bytes -= received.size
            if received.key in self._clients:
                return received
            self._refused += 1

    def _hold(self) -> None:
        while self._held < _HELD and self._held_bytes < _HELD_BYTES:
            received = self._receive()
            if received is None:
                return
            self._turns.add(received.peer, received.connection, received)
            self._held += 1
            self._held_bytes += received.size

    def charge(self, received: Received, seconds: float) -> None:
        """Implement DoorSocket."""
        self._turns.charge(received.peer, received.connection, seconds)

    def _receive(self) -> Received | None:
        self.pending = False
        self._refused += self._zap.answer(self._clients)
        for _ in range(_BURST):
            if self._skips and not self._skip():
                break
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._look()
                return None
            rest = self._rest()
            # Behind the message: the peer that had its descriptor before is known to have left.
            self._look()
            connection = self._known(frame, delimited=rest[0])
            if connection is not None and self._skips:
                self._leave(connection)
            elif connection is not None:
                key = connection.key
                peer, name = f"key:{key}", self._clients[key]
                return Received(connection.number, *rest, peer, key, name)
        self.pending = True
        return None

    def full(self, connection: int) -> bool:  # noqa: ARG002 - as a DoorSocket has it
        """Implement DoorSocket: a full connection shows at `send`."""
        return False

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Implement DoorSocket."""
        to = self._by_number.get(connection)
        if to is None or to.key not in self._clients:
            return "gone"
        return self._send(to.routing_id, data, delimited=delimited)

    def session_began(self, connection: int) -> None:
        """Implement DoorSocket."""
        if connection in self._by_number:
            self._by_number[connection].session = True

    def session_ended(self, connection: int) -> None:
        """Implement DoorSocket."""
        if connection in self._by_number:
            self._by_number[connection].session = False

    def take_closed(self) -> list[int]:
        """Implement DoorSocket."""
        closed, self._closed = self._closed, []
        return closed

    def hung_up(self) -> list[int]:
        """Implement DoorSocket: `take_closed` gives them all."""
        self._look()
        return []

    def tick(self, now: float) -> None:
        """Implement DoorSocket: disconnect silent peers, and all where too much memory is taken."""
        self._now = now
        self._look()
        for one in [one for one in self._connections.values() if not one.number]:
            if one.until <= now:
                self._leave(one)
        if self._growth.exceeds(self._settings.current.memory_bytes) and self._connections:
            _log.warning(
                "the daemon has grown too much: all connections by TCP were closed",
                connections=len(self._connections),
            )
            self.overweight += len(self._connections)
            for one in list(self._connections.values()):
                self._leave(one)
            self._growth.forgive()

    def take_counts(self) -> tuple[int, int, int]:
        """Since the last call: connections, those that had a listed key, and what was refused."""
        counts = self._accepted, self._handshakes, self._refused
        self._accepted = self._handshakes = self._refused = 0
        return counts

    def close(self) -> None:
        """Implement DoorSocket."""
        self._listener.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close()
        self._socket.close(linger=round(1000 * FLUSH_S))
        self._context.term()

    def _first_id(self) -> int:
        """The first routing id that the socket gives, which is the number of a peer of our own."""
        self._socket.bind(_FIRST)
        with self._context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(_FIRST)
            peer.send(b"")
            routing_id, _ = self._socket.recv_multipart()
        self._socket.unbind(_FIRST)
        return int.from_bytes(routing_id[1:], "big")

    def _known(self, frame: zmq.Frame, *, delimited: bool) -> _Connection | None:
        """Connection whose message begins with this frame; None for one to be dropped."""
        routing_id, key = frame.bytes, str(frame.get("User-Id"))
        if key not in self._clients:
            self._refused += 1
            return None
        known = self._by_routing_id.get(routing_id)
        if known is not None:
            return known if known.key == key else None
        if not self._is_given(routing_id):
            self._refused += 1
            # An id in use gets no answer: no peer may try many to find one near the count.
            self._zap.put_off(key)
            self._send(routing_id, _NAMED, delimited=delimited)
            return None
        connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        if connection is None:
            return None
        if connection.number:
            if self._count_of(routing_id) < self._count_of(connection.routing_id):
                # It has left, and another has come in its place.
                return None
            # Earlier messages by this descriptor were of a peer that had left.
            self._unname(connection)
        connection.number, connection.routing_id, connection.key = (
            next(self._numbers),
            routing_id,
            key,
        )
        self._by_routing_id[routing_id] = self._by_number[connection.number] = connection
        return connection

    def _is_given(self, routing_id: bytes) -> bool:
        """True if ZeroMQ gave this id: it counts them up, one for each admitted peer."""
        if len(routing_id) != _ID_BYTES or routing_id[0]:
            return False
        return 0 < self._count_of(routing_id) <= self._zap.admitted

    def _count_of(self, routing_id: bytes) -> int:
        """Number of routing ids that ZeroMQ had given, this one included."""
        return (int.from_bytes(routing_id[1:], "big") - self._first) % _IDS

    def _send(self, routing_id: bytes, data: bytes, *, delimited: bool) -> Sent:
        parts = [routing_id, b"", data] if delimited else [routing_id, data]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def _rest(self) -> tuple[bool, bytes, int, Sequence[memoryview]]:
        """Receive the rest of a message: delimiter or not, first frame, frame count, pictures."""
        more = self._socket.getsockopt(zmq.RCVMORE)
        first = self._socket.recv(zmq.NOBLOCK) if more else b""
        frames = int(bool(more))
        more = self._socket.getsockopt(zmq.RCVMORE)
        delimited = bool(more) and not first
        if delimited:
            first = self._socket.recv(zmq.NOBLOCK)
            more = self._socket.getsockopt(zmq.RCVMORE)
        pictures = []
        while more and not self._skips:
            picture = self._socket.recv(zmq.NOBLOCK, copy=False)
            if frames <= self._pictures:
                pictures.append(picture.buffer)
            frames += 1
            more = self._socket.getsockopt(zmq.RCVMORE)
            self._skips = bool(more) and frames > self._pictures + _FRAMES
        return delimited, first, frames, pictures

    def _skip(self) -> bool:
        """Read on in a message with too many frames; whether it is at its end."""
        for _ in range(_FRAMES):
            self._socket.recv(zmq.NOBLOCK, copy=False)
            self._skips = bool(self._socket.getsockopt(zmq.RCVMORE))
            if not self._skips:
                return True
        return False

    def _look(self) -> None:
        """Read connect and disconnect events."""
        while True:
            try:
                told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            descriptor = int(told["value"])
            if told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes += 1
                continue
            self._forget(descriptor)
            if told["event"] == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                self._connections[descriptor] = _Connection(descriptor, self._now + _SILENT_S)
                if len(self._connections) > self._settings.current.clients + STRANGERS:
                    # In the order in which they came.
                    strangers = (one for one in self._connections.values() if not one.session)
                    self._leave(next(strangers))

    def _forget(self, descriptor: int) -> None:
        gone = self._connections.pop(descriptor, None)
        if gone is not None and gone.number:
            self._unname(gone)

    def _unname(self, connection: _Connection) -> None:
        del self._by_routing_id[connection.routing_id], self._by_number[connection.number]
        if connection.session:
            self._closed.append(connection.number)
        connection.session = False

    def _leave(self, connection: _Connection) -> None:
        """Close a connection of ZeroMQ's, which has no way to ask for that."""
        self._forget(connection.descriptor)
        with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as peer:
            # The number may be another file's by now.
            if peer.family == socket.AF_INET and peer.getsockname()[1] == self.port:
                peer.shutdown(socket.SHUT_RDWR)


def _options(settings: DoorSettings) -> dict[int, int]:
    return {
        zmq.ROUTER_MANDATORY: 1,
        zmq.MAXMSGSIZE: ANSWERED_SIZE * max(settings.frame_bytes, settings.image_bytes),
        zmq.SNDHWM: settings.send_mark,
        zmq.RCVHWM: settings.receive_mark,
        zmq.HANDSHAKE_IVL: round(settings.handshake_s * 1000),
        # The kernel reports a peer's death; a heartbeat would only cut off one that is paused.
        zmq.HEARTBEAT_IVL: 0,
        zmq.LINGER: 0,
    }
