from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from actors.mailbox import check_endpoint

Place = Literal["shared", "process"]
Room = Literal["daemon", "tokenizer", "scheduler", "executor"]
"""A process: the daemon's, or that of the one actor which it is named after."""
Inbox = Literal["tokenizer", "scheduler", "scheduler_control", "door", "supervisor"]

WORK_LIMIT = 4096
"""Messages that may wait at each end of a mailbox for work."""
CONTROL_LIMIT = 8192
"""Messages that may wait at each end of a mailbox for control."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """For each actor: in the daemon's process (`shared`) or in one of its own (`process`)."""

    tokenizer: Place = "shared"
    scheduler: Place = "shared"
    executor: Place = "process"

    def room(self, actor: Literal["tokenizer", "scheduler", "executor"]) -> Room:
        """The process that the actor runs in."""
        return actor if getattr(self, actor) == "process" else "daemon"


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoint of each lasting inbox, as the actors of one process reach it."""

    tokenizer: str
    scheduler: str
    scheduler_control: str
    door: str
    supervisor: str


class ExecutorAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """The inboxes of one incarnation of the executor.

    The scheduler connects to `work` and `control`, the supervisor to `supervisor_control`.
    """

    work: str
    control: str
    supervisor_control: str

    def control_endpoints(self) -> tuple[str, ...]:
        """The endpoints at which the control inbox listens."""
        return tuple(sorted({self.control, self.supervisor_control}))


class AddressBook(msgspec.Struct, frozen=True, kw_only=True):
    """Names every inbox in the private folder `folder` (for sockets) under one placement."""

    folder: str
    placement: Placement

    def seen_from(self, room: Room) -> Addresses:
        """The addresses to which actors in the process `room` connect."""
        return Addresses(
            tokenizer=self._address("tokenizer", room),
            scheduler=self._address("scheduler", room),
            scheduler_control=self._address("scheduler_control", room),
            door=self._address("door", room),
            supervisor=self._address("supervisor", room),
        )

    def endpoints(self, inbox: Inbox) -> tuple[str, ...]:
        """The endpoints at which an inbox listens: one for each kind of sender."""
        return tuple(sorted({self._address(inbox, room) for room in self._rooms()}))

    def executor(self, incarnation: int) -> ExecutorAddresses:
        """Fresh addresses, so that no mail for an earlier executor reaches this one."""
        home = self.placement.room("executor")
        scheduler = self.placement.room("scheduler")
        work, control = _executor_names(incarnation)
        return ExecutorAddresses(
            work=self._named(work, home, scheduler),
            control=self._named(control, home, scheduler),
            supervisor_control=self._named(control, home, "daemon"),
        )

    def remove_sockets(self, incarnation: int) -> None:
        """Delete the socket files that a killed executor has left."""
        for name in _executor_names(incarnation):
            (Path(self.folder) / name).unlink(missing_ok=True)

    def _rooms(self) -> set[Room]:
        placement = self.placement
        return {
            "daemon",
            placement.room("tokenizer"),
            placement.room("scheduler"),
            placement.room("executor"),
        }

    def _address(self, inbox: Inbox, sender: Room) -> str:
        homes: dict[Inbox, Room] = {
            "tokenizer": self.placement.room("tokenizer"),
            "scheduler": self.placement.room("scheduler"),
            "scheduler_control": self.placement.room("scheduler"),
            "door": "daemon",
            "supervisor": "daemon",
        }
        return self._named(inbox, homes[inbox], sender)

    def _named(self, name: str, home: Room, sender: Room) -> str:
        if home == sender:
            return f"inproc://{name}"
        endpoint = f"ipc://{self.folder}/{name}"
        check_endpoint(endpoint)
        return endpoint


def _executor_names(incarnation: int) -> tuple[str, str]:
    return f"executor-{incarnation}", f"executor-{incarnation}-control"
