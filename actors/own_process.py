"""Process attributes that an actor's process, or its helper's, sets for itself."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_OOM_SCORE_ADJ = 500  # proc(5): of a thousand, what a process counts for beside its memory


def ignore_signals() -> None:
    """Ignore signals that ask this process to end: its parent decides when it does.

    Ctrl-C, the end of a terminal and a service manager's stop reach every process of the group.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent dies, so that device and memory are free.

    Raises SystemExit if the parent is dead already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def die_first() -> None:
    """Raise this process's OOM score, so that it is killed before the daemon, which restarts it."""
    path = Path("/proc/self/oom_score_adj")
    # Raising it needs no privilege; a system without the file has nothing to choose by.
    with suppress(OSError):
        path.write_text(str(max(_OOM_SCORE_ADJ, int(path.read_text()))))
