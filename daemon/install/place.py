from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hearth.daemon.install import manager

UNITS = ("hearth.service", "hearth.socket")
_SYSTEM = {
    "hearth.service": "etc/systemd/system/hearth.service",
    "hearth.socket": "etc/systemd/system/hearth.socket",
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
        return self.root is None and manager.runs(self.environ, user=self.user)

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
        return [path for path in self.files(jetson=False) if path.name in UNITS]

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
