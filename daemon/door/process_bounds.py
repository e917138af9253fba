"""How much the daemon's process may take: ZeroMQ bounds neither bytes nor connections."""

import os
import resource
import sys
from collections.abc import Callable
from typing import NamedTuple


class Use(NamedTuple):
    """Memory in RAM that is no file's, in bytes, and the lowest descriptor that is free."""

    memory: int
    descriptor: int


def use_of_process() -> Use:
    """What this process takes now."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Use(0, sys.maxsize)
    try:
        resident, shared = os.read(descriptor, 64).split()[1:3]
    finally:
        os.close(descriptor)
    return Use((int(resident) - int(shared)) * resource.getpagesize(), descriptor)


class ProcessBounds:
    """Whether a process has grown by more than `memory` bytes, or opened more than `files`.

    Growth counts from the first look; a `memory` of 0 means no bound.
    """

    def __init__(self, memory: int, files: int, look: Callable[[], Use] = use_of_process) -> None:
        self._memory = memory
        self._files = files
        self._look = look
        self._start = look().memory

    def exceeded(self) -> bool:
        """Whether it is above a bound now."""
        use = self._look()
        grown = bool(self._memory) and use.memory - self._start > self._memory
        return grown or use.descriptor > self._files

    def forgive(self) -> None:
        """Count from what is in use now, if that is more: the process uses it again."""
        self._start = max(self._start, self._look().memory)
