"""Hearth as a service of a machine for tests: this checkout, where the service can reach it."""

import os
import signal
import sys
import sysconfig
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from hearth_client import Client
from tests.systemd.machine import PATIENCE_S, Machine

ROOT = Path(__file__).parents[2]
FOLDER = "/opt/hearth"
COMMAND = f"{FOLDER}/bin/hearth"
ENGINE = "/opt/engines/tiny"
SERVICE = "hearth.service"
SOCKET = "hearth.socket"
SETTINGS = {
    "engine": ENGINE,
    "engine_kind": "simulated",
    "step_ms": 20,
    "drain_s": 20,
    "progress_timeout_s": 7,
}
SHORT_TIMES = "[Service]\nWatchdogSec=5\nTimeoutStopSec=3\n"
"""What tests say where they say nothing else: executor and requests have more time than that."""
_BASE = "/opt/python"
_SITE = Path(sysconfig.get_path("purelib"))
BOUND = {ROOT: f"{FOLDER}/source", _SITE: f"{FOLDER}/packages", Path(sys.base_prefix): _BASE}
"""What a machine has to show; the interpreter too, which may lie in a home folder."""
_COMPILED = "; ".join(
    f"import {module}"
    for module in (
        "hearth.actors.host",
        "hearth.actors.executor.open",
        "hearth.daemon.cli.serve",
        "hearth.daemon.service",
    )
)
_SCRIPT = f"""\
#!{FOLDER}/bin/python
import sys
from hearth.daemon.cli import main
sys.exit(main())
"""


class Installed:
    """The environment /opt/hearth of a machine, and the service that comes from it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        places = [
            f"{FOLDER}/{name}" for name in ("source/src", "source/clients/python", "packages")
        ]
        own = f"home = {_BASE}/bin\ninclude-system-site-packages = false\n"
        machine.write(f"{FOLDER}/pyvenv.cfg", own)
        machine.write(f"{FOLDER}/lib/{version}/site-packages/hearth.pth", "\n".join(places))
        machine.write(COMMAND, _SCRIPT, mode=0o755)
        machine.path(f"{FOLDER}/bin/python").symlink_to(f"{_BASE}/bin/{version}")
        machine.run("ldconfig", f"{_BASE}/lib")
        # The service's user may not keep what Python compiles, and each start would do it again.
        machine.run(f"{FOLDER}/bin/python", "-c", _COMPILED)

    def hearth(self, *words: str, user: str = "root", check: bool = True) -> str:
        """What the command `hearth` prints, errors behind the rest."""
        ended = self.machine.run(COMMAND, *words, user=user, check=check)
        return ended.stdout + ended.stderr

    def ready(self, drop_in: str = SHORT_TIMES, **settings: Any) -> None:
        """Have the service run with these settings and this drop-in, started anew if they differ.

        What was counted of starts and failures is forgotten.
        """
        self.settle(drop_in, **settings)
        self.machine.systemctl("start", SERVICE)

    def settle(self, drop_in: str = SHORT_TIMES, **settings: Any) -> None:
        """Lay settings and a drop-in down; the service is stopped if they differ."""
        toml = _toml({**SETTINGS, **settings})
        if (self._text(_SETTINGS_FILE), self._text(_DROP_IN)) != (toml, drop_in):
            self.machine.systemctl("stop", SERVICE, SOCKET)
            self.write_settings(**settings)
            self.machine.write(_DROP_IN, drop_in)
            self.machine.systemctl("daemon-reload")
        # Fails where nothing has been started yet.
        self.machine.run("systemctl", "reset-failed", SERVICE, SOCKET, check=False)
        self.machine.systemctl("start", SOCKET)

    def write_settings(self, **settings: Any) -> None:
        """Write the settings file, for whoever reads it next."""
        self.machine.write(_SETTINGS_FILE, _toml({**SETTINGS, **settings}))

    def client(self, timeout: float = PATIENCE_S) -> Client:
        """A client of the service, or to be."""
        return Client(self.machine.path("/run/hearth/hearth.sock"), timeout=timeout)

    def show(self, name: str) -> str:
        """A property of the service."""
        return self.machine.show(SERVICE, name)

    def until(self, name: str, value: str) -> None:
        """Wait until a property of the service has this value."""
        self.machine.until(SERVICE, name, value)

    def when(self, name: str) -> float:
        """A time of the service's, in seconds as `time.time` has them."""
        told = self.machine.systemctl("show", "--timestamp=us+utc", "--value", "-p", name, SERVICE)
        _, day, clock, _ = told.split()
        return datetime.fromisoformat(f"{day}T{clock}+00:00").timestamp()

    def processes(self) -> tuple[int, int]:
        """Daemon and executor, by the numbers that they have here."""
        group = f"/sys/fs/cgroup{self.show('ControlGroup')}/cgroup.procs"
        daemon, executor = map(int, sorted(self._text(group).split(), key=_is_executor))
        return daemon, executor

    def signal_daemon(self, number: signal.Signals) -> None:
        """Send the daemon a signal, and its executor none."""
        os.kill(self.processes()[0], number)

    def signal_executor(self, number: signal.Signals) -> None:
        """Send the executor a signal, and its daemon none."""
        os.kill(self.processes()[1], number)

    def _text(self, inside: str) -> str:
        path = self.machine.path(inside)
        return path.read_text() if path.exists() else ""


_SETTINGS_FILE = "/etc/hearth/hearth.toml"
_DROP_IN = "/etc/systemd/system/hearth.service.d/50-trial.conf"


def _is_executor(process: str) -> bool:
    return b"hearth.actors.host" in Path(f"/proc/{process}/cmdline").read_bytes()


def _toml(settings: Mapping[str, Any]) -> str:
    lines = (f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in settings.items())
    return "".join(f"{line}\n" for line in lines)
