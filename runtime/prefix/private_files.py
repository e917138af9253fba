"""Folders and files that are this user's alone, and what other engines have left in them."""

import os
import re
import stat
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from runtime.errors import HearthError
from runtime.prefix.spill_file import SUFFIX

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ENGINES = re.compile(r"[0-9a-f]{32}\.v[0-9]+")


def make_private(folder: Path) -> None:
    """Have a folder that nobody else can write to.

    Raises `invalid_value` with the field `prefix_folder`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(folder, f"cannot be used ({error.strerror})") from error
    if facts.st_uid != os.geteuid() or facts.st_mode & _OF_OTHERS:
        raise _unusable(folder, "has to be this user's own, and nobody else's to write to")
    if not usable:
        raise _unusable(folder, "cannot be read and written")


def open_private(path: Path) -> FileIO:
    """A regular file of this user's that nobody else could have written; raises OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(number, "rb", buffering=0)
    facts = os.fstat(file.fileno())
    if (
        not stat.S_ISREG(facts.st_mode)
        or facts.st_uid != os.geteuid()
        or facts.st_mode & _OF_OTHERS
    ):
        file.close()
        raise PermissionError(0, "others may have written it")
    return file


class _File(NamedTuple):
    used: float
    size: int
    path: Path


class OtherSpills:
    """Pages of other engines, and of other versions, in the same folder: the oldest goes first."""

    def __init__(self, folder: Path, own: Path) -> None:
        found = []
        for path in folder.glob(f"*/*{SUFFIX}"):
            if path.parent != own and _ENGINES.fullmatch(path.parent.name):
                with suppress(OSError):
                    facts = path.lstat()
                    found.append(_File(facts.st_mtime, facts.st_size, path))
        self._files = deque(sorted(found))
        self.bytes = sum(file.size for file in found)

    def shrink_to(self, most_bytes: int) -> None:
        """Remove files until the rest takes no more than that, or nothing is left."""
        while self._files and self.bytes > most_bytes:
            file = self._files.popleft()
            self.bytes -= file.size
            # Whoever put it there may have removed it, and a folder goes with its last file.
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
                file.path.parent.rmdir()


def _unusable(folder: Path, what: str) -> HearthError:
    return HearthError("invalid_value", f"the folder {folder} {what}", "prefix_folder")
