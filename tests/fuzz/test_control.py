"""The owner's socket: lines in, lines out, over a real pair of sockets."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
import msgspec

from hearth.actors.messages import ActorMessage, SchedulerReport
from hearth.daemon.adapters import AdapterFolder, AdapterStore
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.control.messages import (
    ControlAnswer,
    ControlError,
    ControlRequest,
    Reload,
    Reloaded,
)
from hearth.daemon.control.server import ControlServer, Handler
from hearth.daemon.observe.observers import Observers
from hearth.runtime.errors import CODES
from hearth.runtime.executor.simulated_engine import simulated_config
from tests.fuzz.clients import Clients
from tests.fuzz.doors import ALL, AT_LEAST, DOORS, PER_TYPE, TYPES, Flat
from tests.fuzz.mutations import mutations

ENCODE = msgspec.json.encode
LINES = 25


class Owner:
    """Who asks a daemon that has clients."""

    def __init__(self, folder: Path) -> None:
        self._opened = ExitStack()
        log: Any = SimpleNamespace(all_lost=0)
        supervisor: Any = SimpleNamespace(pid=None, silent_s=0.5, restarts=0)
        observers = Observers(Settings(), "toy", simulated_config(), log=log, opened=self._opened)
        self.clients = Clients(folder, 5, observers.listeners)
        # The scheduler would be asked, and is played by nobody.
        self._opened.enter_context(patch.object(self.clients.door, "load", self._load))
        observers.open(self.clients.door, [supervisor])
        adapters = AdapterStore(
            AdapterFolder(folder / "adapters"),
            simulated_config(),
            tell=lambda _message: False,
            gone=self._gone,
            served=lambda: None,
        )
        handlers: dict[type[ControlRequest], Handler] = {
            Reload: self._reload,
            **observers.handlers,
            **adapters.handlers,
        }
        assert set(handlers) == set(DOORS["ControlRequest"])
        self.server = ControlServer(folder / "f.sock.ctl", handlers)
        self._theirs, self._ours = socket.socketpair()
        for end in (self._theirs, self._ours):
            end.setblocking(False)
        kinds = {kind.__struct_config__.tag for kind in ControlAnswer.__subclasses__()}
        self._tags = {str(kind) for kind in kinds}

    async def serve(self) -> None:
        await self.server._serve(self._theirs)

    async def ask(self, lines: list[bytes]) -> list[dict[str, object]]:
        """One answer to each line, in order."""
        data = b"".join(line + b"\n" for line in lines)
        count = data.count(b"\n")
        self._ours.send(data)
        read = bytearray()
        while read.count(b"\n") < count:
            await anyio.wait_readable(self._ours)
            read += self._ours.recv(1 << 20)
        answers = [msgspec.json.decode(line) for line in read.splitlines()]
        assert len(answers) == count
        for answer in answers:
            assert answer["t"] in self._tags
            if answer["t"] == ControlError.__struct_config__.tag:
                assert answer["code"] in CODES
                assert answer["code"] != "internal"
        return answers

    def close(self) -> None:
        self._ours.close()
        self.server.close()
        self.clients.door.close()
        self._opened.close()

    async def _load(self) -> SchedulerReport:
        return SchedulerReport(0, 1, 2, 3, 4, 5, 6, 7)

    async def _gone(self, _name: str) -> None:
        pass

    async def _reload(self, _asked: Reload) -> Reloaded:
        return Reloaded([], [])


async def test_every_line_to_the_control_socket(short_folder: Path) -> None:
    owner, told, flat = Owner(short_folder), 0, None
    names: list[str] = [""]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.serve)
        for part in range(4):
            for kind in DOORS["ControlRequest"]:
                given = {"request": names, "folder": ["/", str(short_folder), "\0", "/\0"]}
                mail = mutations(kind, f"{kind} {part}", -(-PER_TYPE // 4), ENCODE, given)
                lines: list[bytes] = []
                for data in mail:
                    told += 1
                    lines.append(data)
                    if len(lines) == LINES:
                        owner.clients.greet()
                        owner.clients.ask()
                        await owner.ask(lines)
                        owner.clients.heard_nothing_else()
                        state, rids = owner.clients.door.state, list(owner.clients.open)
                        names[:] = ["", *map(state.request_id, rids)]
                        lines = []
                await owner.ask(lines or [b"{}"])
                owner.clients.heard_nothing_else()
            if flat is None:
                flat, before = Flat(), told
        (reloaded,) = await owner.ask([ENCODE(Reload())])
        assert reloaded["t"] == "reloaded"
        tasks.cancel_scope.cancel()
    assert flat is not None
    flat.check(told - before)
    assert told >= PER_TYPE * len(DOORS["ControlRequest"])
    owner.clients.works()
    owner.close()


HERE = Path(__file__).parent


def test_every_type_has_its_share_of_all_mutations() -> None:
    assert PER_TYPE >= AT_LEAST
    assert PER_TYPE * TYPES >= ALL
    assert TYPES >= 47


def test_every_message_between_actors_goes_to_some_inbox() -> None:
    known = {kind for kinds in DOORS.values() for kind in kinds}
    sent = set(ActorMessage.__subclasses__())
    assert sent <= known


def test_every_door_has_its_test() -> None:
    sources = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert all(f'"{name}"' in sources for name in DOORS)
