"""The memory that the machine has left."""

import ctypes
from pathlib import Path


def release_free_memory() -> None:
    """Hand freed memory back to the system, where the C library has a way to.

    Opening an engine transposes and packs its weights; what that frees, up to half as much again
    as the weights, would otherwise stay resident for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that a process may still take: the machine's, or what a limit leaves of them.

    Limits are those of its control groups, and that of the addresses of this process, which its
    children have too (`ulimit -v`). `root` is the root of the file system with `proc` and `sys`.
    """
    free = _kibibytes(root / "proc/meminfo", "MemAvailable") << 10
    limits = [*map(_headroom, _control_groups(root)), _free_addresses(root / "proc/self")]
    return min([free, *(limit for limit in limits if limit is not None)])


def _free_addresses(process: Path) -> int | None:
    try:
        lines = (process / "limits").read_text().splitlines()
        used = _kibibytes(process / "status", "VmSize") << 10
    except OSError:
        return None
    limit = next((line.split()[3] for line in lines if line.startswith("Max address space")), "")
    return max(int(limit) - used, 0) if limit.isdigit() else None


def _kibibytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"{path} has no {name}")


def _control_groups(root: Path) -> list[Path]:
    """The folders of this process's control group and of all groups around it."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    unified = next((line[3:] for line in lines if line.startswith("0::")), None)
    if unified is None:
        return []
    own = mount / unified.strip("/")
    return [own, *(parent for parent in own.parents if mount in (parent, *parent.parents))]


def _headroom(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - used + _file_pages(group), 0)


def _file_pages(group: Path) -> int:
    """Bytes that count as used and make way, such as those of an engine that was read before."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    return int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
