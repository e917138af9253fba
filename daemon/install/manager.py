"""The service manager, by its own commands."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hearth.runtime.errors import HearthError

# A stop may take as long as requests may finish (drain_s), an hour at most.
_PATIENCE_S = 3900.0


def runs(environ: Mapping[str, str] = os.environ, *, user: bool) -> bool:
    """True if systemd runs, for the system or for this user."""
    folder = environ.get("XDG_RUNTIME_DIR", "") if user else "/run"
    marker = "systemd/private" if user else "systemd/system"
    return bool(folder) and (Path(folder) / marker).exists()


def run(*command: str) -> None:
    """Run a command of systemd; one that fails raises `internal` with its last line."""
    done = _run(command)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise HearthError("internal", f"{' '.join(command)} failed: {words[-1]}")


def succeeds(*command: str) -> bool:
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
