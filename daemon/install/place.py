"""Place of a service, and its service manager, by systemd's own commands."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hearth.runtime.errors import HearthError

# A stop may take as long as requests may finish (drain_s), an hour at most.
_PATIENCE_S = 3900.0


def manager_runs(environ: Mapping[str, str] = os.environ, *, user: bool) -> bool:
    """True if systemd runs, for the system or for this user."""
    folder = environ.get("XDG_RUNTIME_DIR", "") if user else "/run"
    marker = "systemd/private" if user else "systemd/system"
    return bool(folder) and (Path(folder) / marker).exists()


def run_command(*command: str) -> None:
    """Run a command of systemd; one that fails raises `internal` with its last line."""
    done = _run(command)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise HearthError("internal", f"{' '.join(command)} failed: {words[-1]}")


def command_succeeds(*command: str) -> bool:
    """True if a command ends with 0."""
    return _run(command).returncode == 0


def _run(command: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(  # noqa: S603 - fixed commands
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
    except FileNotFoundError as error:
        raise HearthError("internal", f"there is no {command[0]} on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise HearthError("internal", f"{' '.join(command)} does not end") from error


UNITS = ("hearth.service", "hearth.socket")
_SYSTEM = {
    "hearth.service": "etc/systemd/system/hearth.service",
    "hearth.socket": "etc/systemd/system/hearth.socket",
    "hearth-http.service": "etc/systemd/system/hearth-http.service",
    "sysusers.conf": "etc/sysusers.d/hearth.conf",
    "tmpfiles.conf": "etc/tmpfiles.d/hearth.conf",
}
_JETSON = {"jetson.conf": "etc/systemd/system/hearth.service.d/10-jetson.conf"}


@dataclass(frozen=True)
class Place:
    """Place of a service: of the system or of a user, on this machine or in an image."""

    home: Path
    """The user's home folder."""
    environ: Mapping[str, str]
    root: Path | None = None
    """The folder that is `/` in an image; None for this machine."""
    user: bool = False

    @property
    def base(self) -> Path:
        """Folder that is `/` for the service."""
        return self.root or Path("/")

    @property
    def is_jetson(self) -> bool:
        """True if the system is NVIDIA's for Jetson boards."""
        return (self.base / "etc/nv_tegra_release").exists()

    @property
    def settings(self) -> Path:
        """The settings file of the system."""
        return self.base / "etc/hearth/hearth.toml"

    @property
    def socket(self) -> str:
        """Path of the service's socket."""
        if self.user:
            return f"{self.environ.get('XDG_RUNTIME_DIR', '$XDG_RUNTIME_DIR')}/hearth/hearth.sock"
        return "/run/hearth/hearth.sock"

    @property
    def live(self) -> bool:
        """True if the service manager that the service is for runs."""
        return self.root is None and manager_runs(self.environ, user=self.user)

    def files(self, *, jetson: bool) -> dict[Path, str]:
        """The files of the service, each with its name in the folder of sources."""
        if not self.user:
            chosen = {**_SYSTEM, **_JETSON} if jetson else _SYSTEM
            return {self.base / target: source for source, target in chosen.items()}
        if self.root is not None:
            folder = self.root / "etc/systemd/user"
        else:
            folder = self._own("XDG_CONFIG_HOME", ".config") / "systemd/user"
        return {folder / name: f"user/{name}" for name in UNITS}

    def units(self) -> list[Path]:
        """The unit files."""
        return [path for path in self.files(jetson=False) if path.suffix != ".conf"]

    def kept_data(self) -> list[Path]:
        """Settings, state, cache and what runs leave, which stay unless they are asked for."""
        if not self.user:
            folders = ("etc/hearth", "var/lib/hearth", "var/cache/hearth", "run/hearth")
            return [self.base / folder for folder in folders]
        return [] if self.root is not None else [self._own("XDG_CACHE_HOME", ".cache") / "hearth"]

    def systemctl(self, *words: str) -> tuple[str, ...]:
        """A command line for the service manager, or for its links in an image."""
        scope = () if not self.user else ("--user",) if self.root is None else ("--global",)
        image = () if self.root is None else (f"--root={self.root}",)
        return ("systemctl", *scope, *image, *words)

    def _own(self, variable: str, folder: str) -> Path:
        return Path(self.environ.get(variable) or self.home / folder)
