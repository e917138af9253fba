"""A machine for tests: the systemd of this one in namespaces, as root, written to memory alone."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BOOT = Path(__file__).with_name("boot.sh")
MANAGER = Path("/lib/systemd/systemd")
PATIENCE_S = 60.0
"""For what takes well below a second on a machine that nobody stalls."""


def why_none() -> str | None:
    """Why no machine can be had here."""
    if os.geteuid() != 0:
        return "a machine in namespaces needs root"
    programs = ["dbus-daemon", "journalctl", "nsenter", "systemctl", "unshare", str(MANAGER)]
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt install systemd dbus util-linux)"
    trial = ["unshare", "--mount", "--pid", "--fork", "--cgroup", "--net", "true"]
    if subprocess.run(trial, check=False, capture_output=True).returncode:
        return "namespaces are not allowed here"
    return None


class Machine:
    """One machine, from its first boot until `close` or the end of this process.

    `bound` maps folders of this machine to places where the other one sees them.
    """

    def __init__(self, folder: Path, bound: Mapping[Path, str]) -> None:
        pairs = [f"{source}:{target}" for source, target in bound.items()]
        holder = ["unshare", "--mount", "--propagation", "private", "sh", str(BOOT), str(folder)]
        # In a session of its own: what ends the tests' whole group leaves it the time to clean up.
        self._holder = subprocess.Popen(
            [*holder, *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.first = 0
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def run(
        self, *command: str, user: str = "root", check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What a command inside gives; where it fails and `check` is set, an error that says it."""
        ended = subprocess.run(
            [*self.entering(user), *command],
            check=False,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=PATIENCE_S,
        )
        if check and ended.returncode:
            raise AssertionError(f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        return ended

    def entering(self, user: str = "root") -> list[str]:
        """The beginning of a command line that is run inside."""
        root = f"/proc/{self.first}/root"
        namespaces = ["-p", "-m", "-u", "-i", "-n", "-C"]
        command = ["nsenter", "-t", str(self.first), *namespaces, f"--root={root}", f"--wd={root}"]
        command += ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]
        if user != "root":
            command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
            command += ["--reset-env", "--"]
        return command

    def path(self, inside: str) -> Path:
        """Where a file of the machine lies for us, a socket too; until it boots again."""
        return Path(f"/proc/{self.first}/root{inside}")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file, with the folders above it."""
        place = self.path(inside)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def systemctl(self, *words: str) -> str:
        """What `systemctl` prints."""
        return self.run("systemctl", *words).stdout

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.systemctl("show", "--value", "-p", name, unit).strip()

    def until(self, unit: str, name: str, value: str) -> None:
        """Wait until a property of a unit has this value."""
        until = time.monotonic() + PATIENCE_S
        while (found := self.show(unit, name)) != value:
            if time.monotonic() > until:
                status = self.run("systemctl", "status", "-l", unit, check=False).stdout
                raise AssertionError(f"{unit}: {name} is {found} and not {value}\n{status}")
            time.sleep(0.05)

    def journal(self, *matches: str, least: int = 0) -> list[dict[str, Any]]:
        """The entries of the journal with these fields, the oldest first, once it has `least`."""
        until = time.monotonic() + PATIENCE_S
        while True:
            self.run("journalctl", "--sync")
            lines = self.run("journalctl", "-o", "json", *matches).stdout.splitlines()
            if len(lines) >= least:
                return [json.loads(line) for line in lines]
            if time.monotonic() > until:
                raise AssertionError(f"{matches}: {len(lines)} entries and not {least}")
            time.sleep(0.05)

    def reboot(self) -> None:
        """Boot again; what was written stays, but in /run and /tmp."""
        self.systemctl("reboot")
        self._wait()

    def close(self) -> None:
        """End it and all that it holds."""
        assert self._holder.stdin
        self._holder.stdin.close()
        self._holder.wait(PATIENCE_S)
        assert self._holder.stdout
        self._holder.stdout.close()

    def _wait(self) -> None:
        assert self._holder.stdout
        ready, _, _ = select.select([self._holder.stdout], [], [], PATIENCE_S)
        line = self._holder.stdout.readline().decode().strip() if ready else ""
        if not line.isdecimal():
            raise AssertionError(f"the machine does not boot: {line or 'it says nothing'}")
        self.first = int(line)
        until = time.monotonic() + PATIENCE_S
        while not self.path("/run/systemd/private").exists():
            if time.monotonic() > until:
                raise AssertionError("the manager of the machine does not answer")
            time.sleep(0.02)
