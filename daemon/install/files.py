"""Laying files down and taking them away: only those that begin with our mark are touched."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hearth.daemon.install.place import UNITS
from hearth.runtime.errors import HearthError

MARK = "# Laid down by hearth install"
"""Begin of the first line of a file that is ours to overwrite and to remove."""


def sources() -> Path:
    """The folder `systemd` of the checkout, or where the wheel's data files were installed.

    Raises `internal` where neither is.
    """
    checkout = Path(__file__).resolve().parents[2] / "systemd"
    # Beside an installed package a folder of that name is not ours.
    if (checkout / UNITS[0]).is_file():
        return checkout
    for file in metadata.files("hearthd") or []:
        if file.parts[-3:] == ("hearth", "systemd", UNITS[0]):
            return Path(str(file.locate())).resolve().parent
    raise HearthError("internal", "this Hearth was installed without its unit files: do it again")


def filled(source: str, hearth: Path) -> str:
    """The text of a source, with the command `hearth` in its place."""
    return (sources() / source).read_text(encoding="utf-8").replace("@HEARTH@", os.fspath(hearth))


def check_inside(base: Path, paths: Iterable[Path]) -> None:
    """Raise `invalid_value` for a path that a link leads out of `base`."""
    for path in paths:
        if not path.parent.resolve().is_relative_to(base.resolve()):
            raise HearthError("invalid_value", f"a link leads from {path} out of {base}", "root")


def lay(texts: Mapping[Path, str]) -> list[Path]:
    """Write files that are new or ours; those that were written, what was right already left out.

    Nothing is written where one of them is not ours: raises `invalid_value`.
    """
    for path in texts:
        if is_foreign(path):
            raise HearthError(
                "invalid_value", f"{path} is not of Hearth's making: move it away, then try again"
            )
    return [path for path, text in texts.items() if _write(path, text)]


def lay_once(path: Path, text: str) -> list[Path]:
    """Write a file that is the operator's from then on, unless there is one."""
    return [] if os.path.lexists(path) or not _write(path, text) else [path]


def take_away(paths: Iterable[Path]) -> list[Path]:
    """Remove those files that are ours, and folders of drop-ins that it leaves empty."""
    removed = [path for path in paths if is_ours(path)]
    for path in removed:
        path.unlink()
        if is_drop_in(path):
            with suppress(OSError):
                path.parent.rmdir()
    return removed


def is_drop_in(path: Path) -> bool:
    """True if a file adds to the unit of the service."""
    return path.parent.name == f"{UNITS[0]}.d"


def is_ours(path: Path) -> bool:
    """True if a file begins with our mark."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def is_foreign(path: Path) -> bool:
    """True if something is there that is not ours."""
    return os.path.lexists(path) and not is_ours(path)


def _write(path: Path, text: str) -> bool:
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    # The service reads it, whatever the umask of who installs is.
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)
    fresh = path.with_name(f".{path.name}.new")
    # In an image a link of that name may lead out of it.
    fresh.unlink(missing_ok=True)
    with fresh.open("xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o644)
    fresh.replace(path)
    return True
