"""Folders and files that are this user's alone."""

import os
import stat
from io import FileIO
from pathlib import Path

from runtime.errors import HearthError

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
    facts = os.fstat(number)
    if (
        not stat.S_ISREG(facts.st_mode)
        or facts.st_uid != os.geteuid()
        or facts.st_mode & _OF_OTHERS
    ):
        os.close(number)
        raise PermissionError(0, "others may have written it")
    return FileIO(number)


def _unusable(folder: Path, what: str) -> HearthError:
    return HearthError("invalid_value", f"the folder {folder} {what}", "prefix_folder")
