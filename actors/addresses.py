"""Endpoints of the actors: names inside the daemon's process, socket files between processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hearth.actors.mailbox import IPC_SCHEME, check_endpoint

WORK_LIMIT = 4096
"""Messages that may wait at each end of a mailbox for work."""
CONTROL_LIMIT = 8192
"""Messages that may wait at each end of a mailbox for control."""

# Front door, tokenizer and scheduler share the daemon's process.
DOOR = "inproc://door"
TOKENIZER = "inproc://tokenizer"
SCHEDULER = "inproc://scheduler"
SCHEDULER_CONTROL = "inproc://scheduler-control"


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints of one incarnation of an actor that has a process of its own.

    It listens at `work` and `control`, answers to `tokenizer`, an encoder to `scheduler`, and
    reports to `supervisor`.
    """

    incarnation: int
    work: str
    control: str
    tokenizer: str
    scheduler: str
    supervisor: str


class SocketFolder:
    """Folder of the sockets between the daemon's process and those of actors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def tokenizer(self) -> str:
        """Endpoint at which the tokenizer listens to other processes."""
        return self._endpoint("tokenizer")

    @property
    def scheduler(self) -> str:
        """Endpoint at which the scheduler listens to other processes, if it does."""
        return self._endpoint("scheduler")

    def supervisor(self, actor: str) -> str:
        """Endpoint at which the supervisor of `actor` listens."""
        return self._endpoint(f"{actor}-supervisor")

    def addresses(self, actor: str, incarnation: int) -> Addresses:
        """Fresh addresses, so that no mail for an earlier incarnation reaches this one."""
        return Addresses(
            incarnation=incarnation,
            work=self._endpoint(f"{actor}-{incarnation}"),
            control=self._endpoint(f"{actor}-{incarnation}-control"),
            tokenizer=self.tokenizer,
            scheduler=self.scheduler,
            supervisor=self.supervisor(actor),
        )

    def _endpoint(self, name: str) -> str:
        endpoint = f"{IPC_SCHEME}{self._folder}/{name}"
        check_endpoint(endpoint)
        return endpoint


def remove_sockets(addresses: Addresses) -> None:
    """Delete the socket files that an actor's process which was killed has left."""
    for endpoint in (addresses.work, addresses.control):
        Path(endpoint.removeprefix(IPC_SCHEME)).unlink(missing_ok=True)
