"""Resident memory and open handles of a process and its children, from /proc."""

from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class Usage(NamedTuple):
    """What a family of processes holds: resident bytes and open file handles."""

    rss_bytes: int
    handles: int


def family_usage(pid: int, proc: Path = _PROC) -> Usage:
    """The sum over `pid` and all its descendants; what has just ended counts nothing."""
    usages = [_usage(proc / str(member)) for member in _family(pid, proc)]
    return Usage(sum(one.rss_bytes for one in usages), sum(one.handles for one in usages))


def _family(pid: int, proc: Path) -> list[int]:
    members = [pid]
    for member in members:
        for children in (proc / str(member) / "task").glob("*/children"):
            members += _children(children)
    return members


def _children(file: Path) -> list[int]:
    # A thread may end between being listed and being read.
    try:
        return [int(child) for child in file.read_text().split()]
    except OSError:
        return []


def _usage(folder: Path) -> Usage:
    try:
        status = (folder / "status").read_text()
        handles = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return Usage(0, 0)
    resident = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "")
    return Usage(1024 * int(resident.split()[1]) if resident else 0, handles)
