"""Install and removal of the service, by a command that its user can run: not in a home folder."""

import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from hearth.daemon.configuration.settings import GROUPS, SETTINGS
from hearth.daemon.configuration.words import allowed, shown
from hearth.daemon.install import files
from hearth.daemon.install.place import UNITS, Place, command_succeeds, run_command
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


_HEAD = """\
# Settings of the service, each with what it is where nothing is said. docs/configuration.md tells
# more; `hearth check` says what they lead to, `systemctl reload hearth` takes what changed.
"""


def example() -> str:
    """A settings file that has every setting, commented out."""
    return _HEAD + "".join(
        f"\n\n# ---- {title} ----\n{''.join(map(_commented, names))}"
        for title, names in GROUPS.items()
    )


def _commented(name: str) -> str:
    setting = SETTINGS[name]
    values = allowed(setting.type, setting.declared.form).capitalize()
    return f"\n# {setting.declared.description} {values}.\n# {name} = {shown(setting.default)}\n"


USER = "hearth"


@dataclass(frozen=True)
class InstallResult:
    """Result of an install, and the command that comes next."""

    written: list[Path]
    kept: list[Path]
    """Drop-ins of the operator's own, under a name of ours."""
    announced: bool
    """True if a service manager runs, which knows of the service now."""
    next_step: str


def install(place: Place, hearth: Path | None, *, jetson: bool | None) -> InstallResult:
    """Write the files of the service, and reload the service manager where it runs.

    `hearth` is the command in an image; None for the one of this environment. Raises HearthError
    for a command that the service could not run, and for files of others in the way.
    """
    _check_place(place)
    command = _command(place, hearth)
    if jetson is None:
        jetson = place.is_jetson
    wanted = place.files(jetson=jetson)
    files.check_inside(place.base, [*wanted, place.settings])
    kept = [path for path in wanted if files.is_drop_in(path) and files.is_foreign(path)]
    texts = {path: files.filled(name, command) for path, name in wanted.items() if path not in kept}
    written = files.lay(texts)
    if not place.user:
        written += files.lay_once(place.settings, example())
    files.take_away(place.files(jetson=True).keys() - wanted.keys())
    live = place.live
    if live:
        _announce(place)
    return InstallResult(written, kept, live, _next_step(place, live=live))


def uninstall(place: Place, *, purge: bool) -> list[Path]:
    """Stop the service and take its files away; what was removed.

    Settings, state, cache and user go with `purge` alone.
    """
    _check_place(place)
    known = place.files(jetson=True)
    files.check_inside(place.base, [*known, *place.kept_data()])
    # The socket first, and the service with it: a client that waits would start it again.
    units = [path for path in reversed(place.units()) if files.is_ours(path)]
    names = [path.name for path in units]
    live = place.live and bool(units)
    if live:
        run_command(*place.systemctl("disable", "--now", *names))
    removed = files.take_away(known)
    for unit in units:
        links = [folder / unit.name for folder in unit.parent.glob("*.wants")]
        for link in filter(Path.is_symlink, links):
            link.unlink()
            removed.append(link)
    if live:
        run_command(*place.systemctl("daemon-reload"))
        # Fails where no unit had failed.
        command_succeeds(*place.systemctl("reset-failed", *names))
    if purge:
        removed += _purge(place)
    return removed


def _check_place(place: Place) -> None:
    if place.root is not None and not place.root.is_dir():
        raise HearthError("invalid_value", f"there is no folder {place.root}", "root")
    if place.root is None and not place.user and os.geteuid() != 0:
        raise HearthError(
            "invalid_value",
            "a service of the system is for root to install: use sudo, or --user for one of yours",
            "user",
        )


def _command(place: Place, hearth: Path | None) -> Path:
    command = own_command() if hearth is None else hearth
    check_name(command)
    if place.user:
        return command
    if hearth is None:
        check_reach(command, own_parts())
    else:
        check_place(command)
    return command


def _announce(place: Place) -> None:
    """Make the user and the socket's folder, and have the units read."""
    sources = {name: os.fspath(path) for path, name in place.files(jetson=False).items()}
    if not place.user:
        run_command("systemd-sysusers", sources["sysusers.conf"])
        run_command("systemd-tmpfiles", "--create", sources["tmpfiles.conf"])
    run_command(*place.systemctl("daemon-reload"))


def _next_step(place: Place, *, live: bool) -> str:
    if live and command_succeeds(*place.systemctl("is-active", "--quiet", UNITS[0])):
        return " ".join(place.systemctl("restart", UNITS[0]))
    if place.root is None:
        return " ".join(place.systemctl("enable", "--now", UNITS[0]))
    enable = " ".join(place.systemctl("enable", UNITS[0]))
    # The system's own start makes users only where the image is marked as new.
    return enable if place.user else f"systemd-sysusers --root={place.root}; {enable}"


def _purge(place: Place) -> list[Path]:
    gone = [path for path in place.kept_data() if path.is_dir()]
    for path in gone:
        rmtree(path)
    if place.root is None and not place.user:
        # The group stays behind its user where clients are in it.
        for database, command in (("passwd", "userdel"), ("group", "groupdel")):
            if command_succeeds("getent", database, USER):
                run_command(command, USER)
    return gone
