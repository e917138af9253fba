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
    """Whether a process has grown by more than `most` bytes since the first look; 0 is no bound."""

    def __init__(self, most: int, look: Callable[[], int] = memory_of_process) -> None:
        self.most = most
        self._look = look
        self._start = look()

    def exceeded(self) -> bool:
        """Tell whether it is above its bound now."""
        return bool(self.most) and self._look() - self._start > self.most

    def forgive(self) -> None:
        """Count from what is in use now, if that is more: the process uses it again."""
        self._start = max(self._start, self._look())
