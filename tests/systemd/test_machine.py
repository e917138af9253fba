import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.systemd.machine import PATIENCE_S, Machine

ROOT = Path(__file__).parent.parent.parent
BOOTED_AND_LEFT = """
import sys, time
from pathlib import Path
from tests.systemd.machine import Machine
print(Machine(Path(sys.argv[1]), {}).first, flush=True)
time.sleep(60)
"""


def _group(first: int) -> str:
    """The control group that holds all of a machine, by name."""
    (unified,) = re.findall(
        r"^0::.*/(hearth-test-\d+)", _text(f"/proc/{first}/cgroup"), re.MULTILINE
    )
    return str(unified)


def _groups() -> set[str]:
    """The control groups of machines, wherever this system shows them."""
    mounts = [line.split() for line in _text("/proc/self/mounts").splitlines()]
    places = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    return {path.name for place in places for path in place.glob("**/hearth-test-*")}


def _text(path: str) -> str:
    return Path(path).read_text()


def test_it_boots_without_a_failed_unit_and_keeps_a_journal(machine: Machine) -> None:
    assert machine.systemctl("is-system-running", "--wait") == "running\n"
    machine.run("logger", "--tag", "somebody", "a word")
    assert machine.journal("SYSLOG_IDENTIFIER=somebody")[0]["MESSAGE"] == "a word"


def test_what_it_writes_survives_its_reboot_and_does_not_reach_this_machine(
    machine: Machine,
) -> None:
    machine.write("/etc/hearth-trial", "kept")
    machine.write("/run/hearth-trial", "lost")
    machine.reboot()
    assert machine.path("/etc/hearth-trial").read_text() == "kept"
    assert not machine.path("/run/hearth-trial").exists()
    assert not Path("/etc/hearth-trial").exists()
    assert not Path("/run/hearth-trial").exists()


def test_settings_of_the_kernel_are_out_of_its_reach(machine: Machine) -> None:
    name = "/proc/sys/kernel/hostname"
    assert machine.run("sh", "-c", f"echo x > {name}", check=False).returncode


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_is_left_of_it(tmp_path: Path, end: str) -> None:
    if end == "close":
        machine = Machine(tmp_path, {})
        first, group = machine.first, _group(machine.first)
        assert group in _groups()
        machine.close()
    else:
        command = [sys.executable, "-c", BOOTED_AND_LEFT, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as tests:
            assert tests.stdout
            first = int(tests.stdout.readline())
            group = _group(first)
            tests.kill()
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and group in _groups():
            time.sleep(0.05)
    assert group not in _groups()
    # A process that has ended has no root, also before anybody asks for its status.
    assert not Path(f"/proc/{first}/root/etc").exists()
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in _text("/proc/self/mounts")
