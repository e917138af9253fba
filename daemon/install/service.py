"""`hearth install` and `hearth uninstall`."""

import os
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from hearth.daemon.configuration.settings import GROUPS, SETTINGS
from hearth.daemon.configuration.words import allowed, shown
from hearth.daemon.install import files, manager, reach
from hearth.daemon.install.place import UNITS, Place
from hearth.runtime.errors import HearthError

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
        manager.run(*place.systemctl("disable", "--now", *names))
    removed = files.take_away(known)
    for unit in units:
        links = [folder / unit.name for folder in unit.parent.glob("*.wants")]
        for link in filter(Path.is_symlink, links):
            link.unlink()
            removed.append(link)
    if live:
        manager.run(*place.systemctl("daemon-reload"))
        # Fails where no unit had failed.
        manager.succeeds(*place.systemctl("reset-failed", *names))
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
    command = reach.own_command() if hearth is None else hearth
    reach.check_name(command)
    if place.user:
        return command
    if hearth is None:
        reach.check_reach(command, reach.own_parts())
    else:
        reach.check_place(command)
    return command


def _announce(place: Place) -> None:
    """Make the user and the socket's folder, and have the units read."""
    sources = {name: os.fspath(path) for path, name in place.files(jetson=False).items()}
    if not place.user:
        manager.run("systemd-sysusers", sources["sysusers.conf"])
        manager.run("systemd-tmpfiles", "--create", sources["tmpfiles.conf"])
    manager.run(*place.systemctl("daemon-reload"))


def _next_step(place: Place, *, live: bool) -> str:
    if live and manager.succeeds(*place.systemctl("is-active", "--quiet", UNITS[0])):
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
            if manager.succeeds("getent", database, USER):
                manager.run(command, USER)
    return gone
