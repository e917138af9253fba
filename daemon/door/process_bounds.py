"""How much the daemon's process may grow: libzmq, which serves TCP, bounds no connection."""

import resource
from collections.abc import Callable
from pathlib import Path


def memory_of_process() -> int:
    """Bytes in RAM of this process that are no file's; 0 where the system does not tell."""
    try:
        resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


class Growth:
    """By how much a process has grown since the first look."""

    def __init__(self, look: Callable[[], int] = memory_of_process) -> None:
        self._look = look
        self._start = look()

    def exceeds(self, most: int) -> bool:
        """Tell whether it is more than `most` bytes; 0 is no bound."""
        return bool(most) and self._look() - self._start > most

    def forgive(self) -> None:
        """Count from what is in use now, if that is more: the process uses it again."""
        self._start = max(self._start, self._look())
