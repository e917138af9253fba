import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(topology: Path = _TOPOLOGY) -> int:
    """Cores that this process may use, hyper-threads of one core counted once."""
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(topology, cpu) for cpu in allowed}
    return max(1, len(cores))


def _core_of(topology: Path, cpu: int) -> str:
    siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    try:
        return siblings.read_text().strip()
    except OSError:
        # No topology is told (some containers): every logical processor counts as a core.
        return str(cpu)
