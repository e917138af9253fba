"""How much the daemon's process may take: ZeroMQ bounds neither bytes nor connections."""

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """Memory in RAM that is no file's, in bytes, and how many files are open."""

    memory: int
    files: int


def use_of_process() -> Use:
    """What this process takes now."""
    try:
        # Not by the lowest descriptor that is free: whoever closes an old connection frees that.
        files = sum(1 for _ in os.scandir("/proc/self/fd"))
        resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    except OSError:
        return Use(0, sys.maxsize)
    return Use((int(resident) - int(shared)) * resource.getpagesize(), files)


class ProcessBounds:
    """Whether a process has grown by more than `memory` bytes, or opened more than `files`.

    Growth counts from the first look; a `memory` of 0 means no bound.
    """

    def __init__(self, memory: int, files: int, look: Callable[[], Use] = use_of_process) -> None:
        self._memory = memory
        self._files = files
        self._look = look
        self._start = look().memory

    def limit(self, memory: int, files: int) -> None:
        """Go by other bounds from now on."""
        self._memory, self._files = memory, files

    def exceeded(self) -> bool:
        """Whether it is above a bound now."""
        use = self._look()
        grown = bool(self._memory) and use.memory - self._start > self._memory
        return grown or use.files > self._files

    def forgive(self) -> None:
        """Count from what is in use now, if that is more: the process uses it again."""
        self._start = max(self._start, self._look().memory)
