"""Check that the service's user can run an environment: not one in a home folder."""

import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hearth.runtime.errors import HearthError
from hearth.runtime.packages import install_wheels

HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108 - what is refused
"""Folders that ProtectHome and PrivateTmp of the unit hide."""
_PLAIN = re.compile(r"/[\w.+@:/-]+", re.ASCII)
_REMEDY = (
    "make an environment that it can use: python3 -m venv /opt/hearth; "
    f"{install_wheels('/opt/hearth/bin/pip', 'cpu')}; /opt/hearth/bin/hearth install"
)


def own_command() -> Path:
    """The command `hearth` of the environment that runs."""
    return Path(sysconfig.get_path("scripts")) / "hearth"


def own_parts() -> list[Path]:
    """Files that `own_command` needs to run: the interpreter, all libraries, and Hearth."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    code = {Path(line[line.index("/") :]) for line in maps if " r-xp " in line and "/" in line}
    libraries = sorted(path for path in code if path.is_file())
    return [Path(sys.executable), Path(os.__file__), Path(__file__), *libraries]


def check_name(hearth: Path) -> None:
    """Raise `invalid_value` for a command that a unit file cannot name."""
    if not _PLAIN.fullmatch(os.fspath(hearth)):
        raise HearthError(
            "invalid_value",
            f"{hearth} cannot stand in a unit file: an absolute path of plain letters can",
            "hearth",
        )


def check_reach(hearth: Path, parts: list[Path], hidden: tuple[Path, ...] = HIDDEN) -> None:
    """Raise `invalid_value` where a user without privileges cannot run `hearth`, made of `parts`.

    Every folder on the way must let others pass, through all links, and none may be among `hidden`.
    """
    if not os.access(hearth, os.X_OK):
        raise HearthError("invalid_value", f"there is no command {hearth}: {_REMEDY}", "hearth")
    for part in (hearth, *parts):
        for step in _way(part):
            if _is_below(step, hidden):
                raise _unreachable(part, f"{step} is hidden from it")
            # A link has no mode of its own, and what it leads to comes next.
            mode = step.lstat().st_mode
            if not stat.S_ISLNK(mode) and not mode & _needed(mode):
                raise _unreachable(part, f"{step} is closed to others")


def check_place(hearth: Path) -> None:
    """Raise `invalid_value` for a command that the unit hides, wherever it will be run."""
    if _is_below(hearth, HIDDEN):
        raise _unreachable(hearth, "its folder is hidden from it")


def _needed(mode: int) -> int:
    return stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH


def _way(path: Path) -> Iterator[Path]:
    """Every folder and link that is passed on the way to a file, and the file, from the root."""
    for step in (*reversed(path.parents), path):
        yield step
        if step.is_symlink():
            yield from _way(Path(os.path.normpath(step.parent.resolve() / step.readlink())))


def _is_below(path: Path, folders: tuple[Path, ...]) -> bool:
    places = {*folders, *(folder.resolve() for folder in folders)}
    return not places.isdisjoint((path, *path.parents))


def _unreachable(part: Path, reason: str) -> HearthError:
    return HearthError(
        "invalid_value", f"the service's user cannot use {part} ({reason}): {_REMEDY}", "hearth"
    )
