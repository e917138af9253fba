"""A front door whose clients send frames and whose actors are played; no socket is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec

from hearth.actors import messages as m
from hearth.actors.arena import Arena
from hearth.actors.settings import PolicySettings
from hearth.daemon.door.finished import Listener
from hearth.daemon.door.front_door import FrontDoor
from hearth.daemon.door.settings import DoorSettings
from hearth.daemon.door.socket import DoorSocket
from hearth.daemon.door.state import DoorFacts
from hearth.daemon.service_state import ServiceState
from hearth.runtime.errors import CODES
from hearth_client import protocol
from hearth_client.protocol import ClientMessage, ServerMessage
from tests.fuzz.mail import FakeSocket, Inbox, Outbox

ENDS = (protocol.Done, protocol.Tokens, protocol.Detokenized, protocol.StatusReport)
PLAIN, DELIMITED, STATUS, NEW = range(0, 8, 2)
CLIENTS = (PLAIN, DELIMITED, STATUS)
"""Numbers of connections to the local socket."""
_SETTINGS: dict[str, Any] = {
    "clients": 6,
    "requests_per_client": 4,
    "frame_bytes": 4096,
    "images_per_request": 2,
    "image_bytes": 1024,
}
_KEPT_OPEN = 6


class Clients:
    """Sends, and holds the door to what it promises behind every message."""

    def __init__(self, folder: Path, seed: int, listeners: Sequence[Listener] = ()) -> None:
        self.random = Random(seed)
        self.socket = FakeSocket(_SETTINGS["images_per_request"])
        self.inbox = Inbox(m.DoorMessage)
        self.tokenizer = Outbox(m.TokenizerMessage)
        self.scheduler = Outbox(m.SchedulerMessage)
        self.control = Outbox(m.SchedulerControl)
        self.arena = Arena.create("fuzz", 4096)
        self.door = FrontDoor(
            DoorSettings(socket=str(folder / "f.sock"), **_SETTINGS),
            PolicySettings(),
            inbox=self.inbox,
            to_tokenizer=self.tokenizer,
            to_scheduler=self.scheduler,
            to_scheduler_control=self.control,
            facts=DoorFacts(server="hearth fuzz", places=2, adapters=["a"]),
            environ={},
            listeners=listeners,
            pictures=self.arena,
        )
        self.door.tell(ServiceState("ready"))
        self.door._socket.close()
        self.door._socket._all = [cast("DoorSocket", self.socket)]
        self.open: dict[int, tuple[int, str]] = {}
        """By number, the requests that nobody has answered."""
        self.held_once = False
        self._known = msgspec.msgpack.Decoder(ClientMessage)
        self._answers = msgspec.msgpack.Decoder(ServerMessage)

    @property
    def held(self) -> int:
        """Bytes that pictures take."""
        pictures = self.door.state.pictures
        assert pictures is not None
        return pictures.bytes

    def say(self, connection: int, message: Any, *more: bytes) -> list[Any]:
        """Let a client say a good message; what it hears."""
        delimiter = [b""] if connection == DELIMITED else []
        return self.send(connection, [*delimiter, msgspec.msgpack.encode(message), *more])

    def send(self, connection: int, frames: Sequence[bytes]) -> list[Any]:
        """Let these frames arrive; what their sender hears, and nobody else."""
        self.socket.put(connection, frames)
        received = self.door._socket.receive()
        assert received is not None
        self.door._requests.handle(received)
        while self.door._requests.fill_one():
            pass
        self.door._tracker.abandon_lost()
        self._note_opened()
        self.held_once = self.held_once or self.held > 0
        answers = self._heard(connection)
        assert len(answers) <= 1
        if not self._decodes(received.data):
            assert [type(one) for one in answers] == [protocol.Error], frames
        return answers

    def tell(self, data: bytes) -> None:
        """Let an actor tell the door something."""
        self.inbox.put(data)
        message = self.inbox.receive_nowait()
        if message is not None:
            self.door._replies.handle(message)
            self.door._tracker.abandon_lost()
            self._heard(None)

    def greet(self) -> None:
        """Let the clients that there always are say hello, if they have to, and all others go."""
        for session in self.door.sessions.all():
            if session.connection not in CLIENTS:
                self.door._tracker.abandon(session, "left")
        for connection in CLIENTS:
            if self.door.sessions.get(connection) is None:
                status_only = connection == STATUS
                hello = protocol.Hello(proto=[1], status_only=status_only)
                assert isinstance(self.say(connection, hello)[0], protocol.Welcome)
        self._heard(None)

    def ask(self) -> None:
        """Let a client open a request, unless enough are open."""
        number = self.random.randrange(1 << 30)
        asked: tuple[Any, ...] = (
            protocol.Generate(id=f"{number}", prompt="a", seed=1),
            protocol.Tokenize(id=f"{number}", text="a"),
            protocol.Status(id=f"{number}"),
        )
        if len(self.open) < _KEPT_OPEN:
            self.say(self.random.choice(CLIENTS[:2]), self.random.choice(asked))

    def answer_some(self) -> None:
        """Play the actors for some of the requests, and for most where there are many."""
        for rid in list(self.open):
            if self.random.random() < len(self.open) / _KEPT_OPEN:
                for message in self._play(rid):
                    self.tell(msgspec.msgpack.encode(message))

    def works(self) -> None:
        """A new client gets its reply."""
        self.greet()
        assert isinstance(self.say(NEW, protocol.Hello(proto=[1]))[0], protocol.Welcome)
        self.say(NEW, protocol.Generate(id="g", prompt="hello"))
        (rid,) = [rid for rid, (whose, _) in self.open.items() if whose == NEW]
        row = m.RowDelta(rid, "hi", [1], finish="stop")
        for message in (m.Accepted(rid, 1), m.Deltas([row], 1.0)):
            self.inbox.put(msgspec.msgpack.encode(message))
            told = self.inbox.receive_nowait()
            assert told is not None
            self.door._answer(told)
        heard = [self._answers.decode(data) for _, data in self.socket.take()]
        assert [type(one).__name__ for one in heard] == ["Accepted", "Delta", "Done"]
        del self.open[rid]
        self.say(NEW, protocol.Bye())
        assert self.door.state.totals["internal_errors"] == 0

    def heard_nothing_else(self) -> None:
        """Take what the door has said of itself; each request has ended once."""
        self.door._tracker.abandon_lost()
        self._heard(None)

    def _play(self, rid: int) -> list[m.DoorMessage]:
        request = self.door.sessions.find(rid)
        if request is None:
            return []
        failed = m.Failed([rid], "executor_failed", "it died", "device", 1)
        if request.kind == "status":
            return [m.SchedulerReport(rid, 1, 2, 3, 4, 5, 6, 7)]
        if request.kind == "convert":
            return [
                self.random.choice((failed, m.Converted(rid, [1]), m.Converted(rid, None, "a")))
            ]
        row = m.RowDelta(rid, "a", [1], finish=self.random.choice(("stop", None)))
        told: list[m.DoorMessage] = [m.Accepted(rid, 1), m.Deltas([row], 2.0, {rid: 1.0}), failed]
        return [one for one in told if self.random.random() < 0.8]

    def _decodes(self, data: bytes) -> bool:
        try:
            self._known.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        return True

    def _note_opened(self) -> None:
        for message in (*self.tokenizer.take(), *self.scheduler.take()):
            if isinstance(message, (m.Request, m.Convert, m.AskReport)):
                request = self.door.sessions.find(message.rid)
                assert request is not None
                assert message.rid not in self.open
                self.open[message.rid] = request.session.connection, request.id
        self.control.take()

    def _heard(self, connection: int | None) -> list[Any]:
        """What has left for `connection`, with each request ended once, by one answer."""
        heard = []
        for whose, data in self.socket.take():
            answer = self._answers.decode(data)
            ended = [rid for rid, one in self.open.items() if one == (whose, _id_of(answer))]
            if isinstance(answer, ENDS):
                assert len(ended) == 1, answer
            if isinstance(answer, protocol.Error):
                assert answer.code in CODES, answer
                assert answer.message or connection is None
            if isinstance(answer, (*ENDS, protocol.Error)):
                for rid in ended:
                    del self.open[rid]
            if whose == connection:
                heard.append(answer)
            else:
                # The door looks whether others are alive where it has no place for a newcomer.
                assert connection is None or isinstance(answer, protocol.Leased)
        # Requests of a client that left get no answer.
        self.open = {rid: one for rid, one in self.open.items() if self.door.sessions.find(rid)}
        assert len(self.open) == len(self.door.sessions.open_requests)
        self.tokenizer.take()
        self.control.take()
        return heard


def _id_of(answer: Any) -> str:
    return getattr(answer, "id", "")
