"""The local socket: it accepts clients itself, knows whose they are, and bounds what each takes."""

import select
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator

import structlog

from hearth.actors.settings import Reloadable
from hearth.daemon.door.fair_queue import FairQueue
from hearth.daemon.door.listener import CREDENTIALS, Listener
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import ANSWERED_SIZE, FLUSH_S, Received, Sent
from hearth.daemon.door.zmtp import (
    DELIMITER,
    GREETING,
    Limits,
    Message,
    Ready,
    Refusal,
    Zmtp,
    header,
)

_log = structlog.get_logger("hearth.door")
STRANGERS = 64
"""Connections without a session, beside those with one."""
_READ_BYTES = 1 << 16
_JOINED_BYTES = 1 << 16
"""Answers up to this size are copied behind their header: two parts are dearer to send."""
_EVENTS = 16
"""Events that are no messages, until others have their turn."""
_ACCEPTS = 16
_LOOK = 64
_TAKEN = 8
"""Events of known connections that are handled between two polls."""
_REPLIES_BYTES = 1024
"""PONGs that may wait for a peer that does not read; more are dropped."""
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_LEFT = select.EPOLLHUP | select.EPOLLERR


class _Connection:
    """One peer; `unsent` is what it has not taken yet of an answer, `held` what all of it takes."""

    __slots__ = (
        "descriptor",
        "held",
        "number",
        "peer",
        "readable",
        "ready",
        "replies",
        "socket",
        "uid",
        "unsent",
        "waits",
        "zmtp",
    )

    def __init__(self, number: int, accepted: socket.socket, limits: Limits) -> None:
        self.number = number
        self.socket = accepted
        self.descriptor = accepted.fileno()
        told = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        self.uid = int(CREDENTIALS.unpack(told)[1])
        self.peer = f"uid:{self.uid}"
        self.zmtp = Zmtp(limits)
        self.unsent = bytearray()
        self.replies = 0
        self.held = 0
        self.ready = False
        self.readable = False
        self.waits = True


class LocalSocket:
    """A ROUTER without libzmq, on a listener which it owns.

    Partial messages and untaken answers of all connections are at most `memory_bytes`; above that
    the largest connection of the user with the most is closed.
    """

    def __init__(
        self, listener: Listener, settings: Reloadable[DoorSettings], numbers: Iterator[int]
    ) -> None:
        self._listener = listener
        self._numbers = numbers
        self._settings = settings
        fixed = settings.current
        self._pictures = fixed.images_per_request
        self._handshake_s = fixed.handshake_s
        pictures = max(fixed.image_bytes, fixed.images_in_flight_bytes if self._pictures else 0)
        self._limits = Limits(
            frame_bytes=ANSWERED_SIZE * max(fixed.frame_bytes, fixed.image_bytes),
            message_bytes=ANSWERED_SIZE * (fixed.frame_bytes + pictures),
            frames=2 + self._pictures,
        )
        self._epoll = select.epoll()
        self._epoll.register(listener.descriptor, _IN)
        self._accepts = True
        self._connections: dict[int, _Connection] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._without_session: dict[int, _Connection] = {}
        self._handshakes: deque[tuple[float, int]] = deque()
        self._accepted: list[int] = []
        self._closed: list[int] = []
        self._turns = FairQueue[_Connection]()
        self._until_look = 0
        self._held = 0
        self.overweight = 0
        """Connections that were closed since all took too much memory."""

    @property
    def descriptors(self) -> list[int]:
        """Implement DoorSocket: one descriptor, the epoll of all connections."""
        return [self._epoll.fileno()]

    @property
    def pending(self) -> bool:
        """Implement DoorSocket."""
        return bool(self._turns)

    @property
    def idle(self) -> bool:
        """Implement DoorSocket: no handshake goes on, and all new connections are accepted."""
        return self._accepts and not (self._accepted or self._handshakes)

    def receive(self) -> Received | None:
        """Implement DoorSocket; the connection that has cost the least is next."""
        for _ in range(_EVENTS):
            if not (self._until_look and self._turns):
                self._look()
                self._until_look = _TAKEN
            self._until_look -= 1
            connection = self._turns.take()
            if connection is None:
                return None
            connection.waits = True
            began = time.thread_time()
            received = self._advance(connection)
            seconds = time.thread_time() - began
            self._turns.charge(connection.peer, connection.number, seconds)
            if received is not None:
                return received
        return None

    def charge(self, received: Received, seconds: float) -> None:
        """Implement DoorSocket; the time to read it is counted already."""
        self._turns.charge(received.peer, received.connection, seconds)

    def full(self, connection: int) -> bool:
        """Implement DoorSocket."""
        to = self._connections.get(connection)
        if to is not None and to.unsent:
            # At the end of the daemon nothing polls for writable connections any more.
            self._flush(to)
        return connection in self._connections and to is not None and bool(to.unsent)

    def send(self, connection: int, data: bytes, *, delimited: bool) -> Sent:
        """Implement DoorSocket: one system call for each answer."""
        to = self._connections.get(connection)
        if to is None:
            return "gone"
        if to.unsent:
            return "full"
        head = DELIMITER + header(len(data)) if delimited else header(len(data))
        parts = [head + data] if len(data) <= _JOINED_BYTES else [head, data]
        try:
            taken = to.socket.sendmsg(parts)
        except BlockingIOError:
            taken = 0
        except OSError:
            self._close(to)
            return "gone"
        if taken < len(head) + len(data):
            to.unsent += memoryview(b"".join(parts))[taken:]
            self._epoll.modify(to.descriptor, _IN | _OUT)
            self._weigh(to)
        return "sent"

    def session_began(self, connection: int) -> None:
        """Implement DoorSocket."""
        self._without_session.pop(connection, None)

    def session_ended(self, connection: int) -> None:
        """Implement DoorSocket."""
        known = self._connections.get(connection)
        if known is not None:
            self._without_session[connection] = known

    def take_closed(self) -> list[int]:
        """Implement DoorSocket."""
        closed, self._closed = self._closed, []
        return closed

    def hung_up(self) -> list[int]:
        """Implement DoorSocket."""
        told = self._epoll.poll(0, len(self._connections) + 1)
        left = [descriptor for descriptor, events in told if events & _LEFT]
        return [self._by_descriptor[one].number for one in left if one in self._by_descriptor]

    def tick(self, now: float) -> None:
        """Implement DoorSocket: disconnect peers whose handshake takes too long."""
        self._handshakes.extend((now + self._handshake_s, one) for one in self._accepted)
        self._accepted.clear()
        while self._handshakes and self._handshakes[0][0] <= now:
            connection = self._connections.get(self._handshakes.popleft()[1])
            if connection is not None and not connection.ready:
                self._close(connection)
        if not self._accepts:
            self._accepts = True
            self._epoll.modify(self._listener.descriptor, _IN)

    def close(self) -> None:
        """Implement DoorSocket."""
        self._epoll.unregister(self._listener.descriptor)
        self._listener.close()
        ends = time.monotonic() + FLUSH_S
        while waiting := [one for one in self._connections.values() if one.unsent]:
            left = ends - time.monotonic()
            if left <= 0:
                break
            poll = select.poll()
            for connection in waiting:
                poll.register(connection.descriptor, select.POLLOUT)
            poll.poll(1000 * left)
            for connection in waiting:
                self._flush(connection)
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()

    def _look(self) -> None:
        """Poll for new connections, and for those that can be read or written."""
        for descriptor, events in self._epoll.poll(0, _LOOK):
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                self._accept()
                continue
            if events & _OUT:
                self._flush(connection)
            if events & ~_OUT:
                connection.readable = True
                self._take_turn(connection)

    def _take_turn(self, connection: _Connection) -> None:
        if connection.waits:
            connection.waits = False
            self._turns.add(connection.peer, connection.number, connection)

    def _advance(self, connection: _Connection) -> Received | None:
        """Give a connection its turn: one event of its own, its message where it is one."""
        if connection.number not in self._connections:
            return None
        event = connection.zmtp.next_event()
        if event is None and connection.readable and self._read(connection):
            event = connection.zmtp.next_event()
        self._weigh(connection)
        if connection.readable or (event is not None and connection.zmtp.pending):
            self._take_turn(connection)
        if isinstance(event, Message):
            return self._received(connection, event)
        if isinstance(event, Ready):
            connection.ready = True
        elif isinstance(event, Refusal):
            _log.debug("a connection is closed", peer=connection.peer, reason=event.reason)
            self._close(connection)
        elif event is not None:
            self._reply(connection, event.data)
        return None

    def _received(self, connection: _Connection, message: Message) -> Received:
        frames = message.frames
        delimited = message.total > 1 and not len(frames[0])
        data, *pictures = frames[delimited : 1 + delimited + self._pictures]
        return Received(
            connection.number,
            delimited,
            bytes(data),
            message.total - delimited,
            [memoryview(one) for one in pictures],
            connection.peer,
        )

    def _read(self, connection: _Connection) -> bool:
        """Take in what has come, up to a bound; False where nothing has, or the peer has left."""
        room = connection.zmtp.room()
        try:
            if room is None:
                data = connection.socket.recv(_READ_BYTES)
                size, most = len(data), _READ_BYTES
                connection.zmtp.receive_data(data)
            else:
                size, most = connection.socket.recv_into(room), len(room)
                connection.zmtp.filled(size)
        except BlockingIOError:
            connection.readable = False
            return False
        except OSError:
            size = most = 0
        # The kernel reports where there is more; of a large frame more comes at once.
        connection.readable = size == most or room is not None
        if not size:
            self._close(connection)
        return size > 0

    def _reply(self, connection: _Connection, data: bytes) -> None:
        """Send what the protocol asks for, behind what waits."""
        if not connection.unsent:
            try:
                data = data[connection.socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                return
        connection.replies += len(data)
        if data and connection.replies <= _REPLIES_BYTES:
            connection.unsent += data
            self._epoll.modify(connection.descriptor, _IN | _OUT)
            self._weigh(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        if not connection.unsent:
            connection.replies = 0
            self._epoll.modify(connection.descriptor, _IN)
        self._weigh(connection)

    def _weigh(self, connection: _Connection) -> None:
        """Count what a connection takes; where all take too much, close one."""
        if connection.number not in self._connections:
            return
        held = connection.zmtp.held + len(connection.unsent)
        self._held += held - connection.held
        connection.held = held
        while self._held > (self._settings.current.memory_bytes or self._held):
            heaviest = self._heaviest()
            self.overweight += 1
            _log.warning(
                "clients took too much memory: the connection that took most was closed",
                peer=heaviest.peer,
                bytes=heaviest.held,
            )
            self._close(heaviest)

    def _heaviest(self) -> _Connection:
        """The one with the most, of the user whose connections take the most together."""
        users = Counter[int]()
        for one in self._connections.values():
            users[one.uid] += one.held
        most = max(users, key=lambda one: users[one])
        of_user = (one for one in self._connections.values() if one.uid == most)
        return max(of_user, key=lambda one: one.held)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._accept_failed(error)
                return
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = _Connection(next(self._numbers), accepted, self._limits)
        if len(self._without_session) >= STRANGERS:
            self._close(self._least(connection.uid))
        self._connections[connection.number] = connection
        self._by_descriptor[connection.descriptor] = connection
        self._without_session[connection.number] = connection
        self._accepted.append(connection.number)
        self._epoll.register(connection.descriptor, _IN)
        # Before anything is received: libzmq sends 10 bytes and waits.
        self._reply(connection, GREETING)

    def _least(self, uid: int | None = None) -> _Connection:
        """Oldest connection without a session of the user with most, one more of `uid` counted."""
        users = Counter(one.uid for one in self._without_session.values())
        if uid is not None:
            users[uid] += 1
        most = max(users, key=lambda one: users[one])
        return next(one for one in self._without_session.values() if one.uid == most)

    def _accept_failed(self, error: OSError) -> None:
        """Free a place for a connection that waits to be accepted, or let it wait for a while."""
        if self._without_session:
            self._close(self._least())
            return
        _log.warning("no connection could be taken", reason=error.strerror)
        # The poll would return at once, again and again.
        self._accepts = False
        self._epoll.modify(self._listener.descriptor, 0)

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        del self._by_descriptor[connection.descriptor]
        self._held -= connection.held
        if self._without_session.pop(connection.number, None) is None:
            self._closed.append(connection.number)
        self._epoll.unregister(connection.descriptor)
        connection.socket.close()
