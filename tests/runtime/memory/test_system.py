import subprocess
import sys
from pathlib import Path

import pytest

from hearth.runtime.memory.system import available_memory

ROOT = Path(__file__).parents[3]
RELEASE = """
from pathlib import Path
from hearth.runtime.memory.system import release_free_memory

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

blocks = [bytes(60_000) for _ in range(2000)]
blocks[:-1] = []
held = resident()
release_free_memory()
print(held - resident())
"""


def test_freed_memory_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", RELEASE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert int(done.stdout) > 50e6


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    return tmp_path


def limit_group(root: Path, group: str, limit: str, used: int) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def test_without_a_control_group_the_machine_is_the_limit(system: Path) -> None:
    assert available_memory(system) == 5000 << 10


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/b": ("max", 100)}, 5000 << 10),
        ({"a/b": ("3000000", 1_000_000)}, 2_000_000),
        ({"a/b": ("max", 0), "a": ("400000", 100_000)}, 300_000),
        ({"a/b": ("1000", 5000)}, 0),
    ],
)
def test_the_tightest_group_around_the_process_counts(
    system: Path, limits: dict[str, tuple[str, int]], expected: int
) -> None:
    (system / "proc/self/cgroup").write_text("1:cpu:/other\n0::/a/b\n")
    for group, (limit, used) in limits.items():
        limit_group(system, group, limit, used)
    assert available_memory(system) == expected


def test_pages_of_files_make_way(system: Path) -> None:
    # As they do in MemAvailable: an engine that was read before is no reason to refuse it now.
    (system / "proc/self/cgroup").write_text("0::/a\n")
    limit_group(system, "a", "3000000", 2_500_000)
    stat = "anon 500000\ninactive_file 1800000\nactive_file 200000\n"
    (system / "sys/fs/cgroup/a/memory.stat").write_text(stat)
    assert available_memory(system) == 2_500_000


def test_older_control_groups_are_not_asked(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("4:memory:/a\n")
    limit_group(system, "a", "1000", 0)
    assert available_memory(system) == 5000 << 10


@pytest.mark.parametrize(
    ("limit", "expected"), [("unlimited", 5000 << 10), ("3000000", 952_000), ("2000000", 0)]
)
def test_a_limit_of_addresses_counts(system: Path, limit: str, expected: int) -> None:
    process = system / "proc/self"
    process.joinpath("status").write_text("Name:\tx\nVmPeak:\t3000 kB\nVmSize:\t    2000 kB\n")
    process.joinpath("limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max resident set          1                    1                    bytes     \n"
        f"Max address space         {limit:<20} unlimited            bytes     \n"
    )
    assert available_memory(system) == expected


def test_this_machine_has_memory() -> None:
    assert available_memory() > 1 << 20
