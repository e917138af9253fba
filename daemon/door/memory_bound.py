"""How far the daemon's process may grow: ZeroMQ has no bound of its own for what clients send."""

import resource
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")


def anonymous_bytes() -> int:
    """Memory of this process that is in RAM and no file's."""
    resident, shared = _STATM.read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


class MemoryBound:
    """Whether a process has grown by more than `limit` bytes since it was looked at first.

    0 means no bound. What stays after its cause was removed is fragmentation, which the process
    uses again: `forgive` counts from there.
    """

    def __init__(self, limit: int, read: Callable[[], int] = anonymous_bytes) -> None:
        self._limit = limit
        self._read = read
        self._start = read()

    def exceeded(self) -> bool:
        """Whether it is above the bound now."""
        return bool(self._limit) and self._read() - self._start > self._limit

    def forgive(self) -> None:
        """Count from what is in use now, if that is more."""
        self._start = max(self._start, self._read())
