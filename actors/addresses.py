"""Endpoints of the actors: names inside the daemon's process, files of a private folder between."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


_PREFIX = "hearth."
_SETTLED_S = 60.0
"""Age in seconds from which an unlocked folder counts as abandoned: it is locked once made."""


@contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder for sockets that only this user may enter, removed at the end.

    It lies in `parent`, else in the system's folder for temporary files, and is locked while in
    use. Folders that killed processes have left there are removed first.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    lock = _open(folder)
    try:
        # A file system without locks has none for a search for abandoned folders either.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(place: Path) -> None:
    """Remove this user's private folders in `place` that no process has locked."""
    for folder in place.glob(f"{_PREFIX}*"):
        # Another daemon may do the same at the same time.
        with suppress(OSError):
            if _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    facts = folder.lstat()
    settled = time.time() - facts.st_mtime > _SETTLED_S
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or not settled:
        return False
    lock = _open(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
