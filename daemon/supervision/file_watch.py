"""File watch: finds files that were changed under the actor that maps them; pure."""

from collections.abc import Mapping
from typing import NamedTuple

STILL_S = 2.0
"""Seconds that files have to be unchanged before they are read."""
_RETRY_S = 60.0
"""Seconds until unchanged files that could not be read are tried again: a disk may be back."""


class WatchedFile(NamedTuple):
    """A file that an actor reads when it starts; it reads a `mapped` file as long as it works."""

    path: str
    mapped: bool = True


class Mark(NamedTuple):
    """Fingerprint of a file by stat(2), without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @property
    def content(self) -> tuple[int, int, int, int]:
        """Part of the fingerprint that differs if the path leads to other bytes."""
        return self[:4]


Marks = Mapping[str, Mark | None]
"""Fingerprints by path; None for a file that is not there."""


class InPlace(NamedTuple):
    """A mapped file that was written to, or cut short, behind the actor's back."""

    path: str
    cut: bool


class FileWatch:
    """Compares the files of one start of an actor with their state at each later look.

    A path that leads to another file is no fault: a mapped file stays as it was.
    """

    def __init__(self) -> None:
        self._files: tuple[WatchedFile, ...] = ()
        self._loaded: Marks = {}
        self._last: Marks = {}
        self._good: Marks = {}
        self._since = 0.0

    @property
    def paths(self) -> list[str]:
        """The files to look at."""
        return [file.path for file in self._files]

    def began(self, files: tuple[WatchedFile, ...], marks: Marks, now: float) -> None:
        """An actor starts to read the files, which are as marked."""
        self._files = files
        self._loaded = self._last = marks
        self._since = now

    def worked(self) -> None:
        """The actor that has read them works."""
        self._good = self._loaded

    def are_others(self) -> bool:
        """Return True if the files of this start differ from the last files that worked."""
        return bool(self._good) and _contents(self._loaded) != _contents(self._good)

    def look(self, marks: Marks, now: float) -> InPlace | None:
        """Take note of how the files are now; the first that was changed in place."""
        if marks != self._last:
            self._last, self._since = marks, now
        for file in self._files:
            was, found = self._loaded.get(file.path), marks.get(file.path)
            if file.mapped and was is not None and found is not None and _rewritten(was, found):
                return InPlace(file.path, cut=found.size < was.size)
        return None

    def may_start(self, now: float) -> bool:
        """Return True if another start on these files has a chance: they differ and are at rest."""
        at_rest_s = now - self._since
        return at_rest_s >= (STILL_S if self._last != self._loaded else _RETRY_S)

    def differing(self, marks: Marks) -> list[str]:
        """The files that have changed since the start."""
        now = _contents(marks)
        return [path for path, was in _contents(self._loaded).items() if was != now.get(path)]


def _rewritten(was: Mark, found: Mark) -> bool:
    return found.content[:2] == was.content[:2] and found.content != was.content


def _contents(marks: Marks) -> dict[str, tuple[int, int, int, int] | None]:
    return {path: None if mark is None else mark.content for path, mark in marks.items()}
