import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
