import os
import re
import stat
from pathlib import Path

import pytest

from hearth.daemon.configuration.load import load_settings
from hearth.daemon.configuration.settings import GROUPS, SETTINGS, Settings
from hearth.daemon.install import reach
from hearth.daemon.install.files import MARK
from hearth.daemon.install.place import Place
from hearth.daemon.install.service import install, uninstall
from hearth.runtime.errors import HearthError

HEARTH = Path("/opt/hearth/bin/hearth")
UNIT = "etc/systemd/system/hearth.service"
SYSTEMCTL = """#!/bin/sh
echo "$*" >>"${0%/*}/said"
case "$*" in *is-active* | *reset-failed*) exit 1 ;; esac
"""


@pytest.fixture
def image(tmp_path: Path) -> Place:
    return Place(tmp_path / "home", {}, root=tmp_path)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A user's own, whose manager only writes down what it is told."""
    (tmp_path / "run" / "systemd").mkdir(parents=True)
    (tmp_path / "run" / "systemd" / "private").touch()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "systemctl"
    command.write_text(SYSTEMCTL)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return Place(tmp_path, {"XDG_RUNTIME_DIR": str(tmp_path / "run")}, user=True)


def said(place: Place) -> list[str]:
    return (place.home / "bin" / "said").read_text().splitlines()


def found(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_an_image_gets_the_files_and_nothing_else(image: Place, tmp_path: Path) -> None:
    laid = install(image, HEARTH, jetson=None)
    files = found(tmp_path)
    assert set(files) == {
        UNIT,
        "etc/systemd/system/hearth.socket",
        "etc/sysusers.d/hearth.conf",
        "etc/tmpfiles.d/hearth.conf",
        "etc/hearth/hearth.toml",
    }
    assert sorted(laid.written) == sorted(tmp_path / name for name in files)
    assert f"\nExecStart={HEARTH} serve\nExecReload={HEARTH} reload\n" in files[UNIT]
    assert not [name for name, text in files.items() if "@HEARTH@" in text]
    assert not laid.announced
    assert laid.next_step.endswith(f"systemctl --root={tmp_path} enable hearth.service")


def test_everybody_may_read_the_files_whatever_the_umask_is(image: Place, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        install(image, HEARTH, jetson=False)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "etc").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o644}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o755}


def test_a_second_install_changes_nothing(image: Place) -> None:
    install(image, HEARTH, jetson=True)
    assert install(image, HEARTH, jetson=True).written == []


def test_a_later_install_brings_the_units_up_to_date(image: Place, tmp_path: Path) -> None:
    install(image, Path("/opt/old/bin/hearth"), jetson=False)
    assert install(image, HEARTH, jetson=False).written == [tmp_path / UNIT]


def test_settings_and_drop_ins_of_the_operator_stay_as_they_are(
    image: Place, tmp_path: Path
) -> None:
    own = {
        "etc/hearth/hearth.toml": "threads = 2\n",
        f"{UNIT}.d/override.conf": "[Service]\n",
        f"{UNIT}.d/10-jetson.conf": "[Service]\nDevicePolicy=auto\n",
    }
    for name, text in own.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    laid = install(image, HEARTH, jetson=True)
    assert laid.kept == [tmp_path / f"{UNIT}.d" / "10-jetson.conf"]
    install(image, HEARTH, jetson=False)
    assert {name: found(tmp_path)[name] for name in own} == own
    uninstall(image, purge=False)
    assert found(tmp_path) == own


def test_a_unit_of_somebody_else_is_not_overwritten(image: Place, tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/hearth.socket"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Socket]\n")
    with pytest.raises(HearthError, match=r"hearth\.socket is not of Hearth's making: move it"):
        install(image, HEARTH, jetson=False)
    assert list(found(tmp_path)) == ["etc/systemd/system/hearth.socket"]
    uninstall(image, purge=False)
    assert unit.is_file()


def test_a_jetson_gets_its_drop_in_and_another_board_loses_it(image: Place, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    release = tmp_path / "etc" / "nv_tegra_release"
    release.touch()
    install(image, HEARTH, jetson=None)
    drop_in = tmp_path / f"{UNIT}.d" / "10-jetson.conf"
    assert "SupplementaryGroups=video render" in drop_in.read_text()
    release.unlink()
    install(image, HEARTH, jetson=None)
    assert not drop_in.parent.exists()


def test_uninstall_leaves_what_is_the_operator_s(image: Place, tmp_path: Path) -> None:
    install(image, HEARTH, jetson=True)
    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "hearth.service").symlink_to(f"/{UNIT}")
    state = tmp_path / "var/lib/hearth/engines"
    state.mkdir(parents=True)
    uninstall(image, purge=False)
    assert set(found(tmp_path)) == {"etc/hearth/hearth.toml"}
    assert not list(wants.iterdir())
    assert state.is_dir()
    assert uninstall(image, purge=False) == []


def test_purge_takes_settings_state_and_cache(image: Place, tmp_path: Path) -> None:
    install(image, HEARTH, jetson=False)
    for folder in ("var/lib/hearth/keys", "var/cache/hearth/engines", "var/lib/other"):
        (tmp_path / folder).mkdir(parents=True)
    uninstall(image, purge=True)
    assert found(tmp_path) == {}
    assert {path.name for path in (tmp_path / "var").rglob("*")} == {"lib", "cache", "other"}


def test_no_link_leads_out_of_an_image(image: Place, tmp_path: Path, short_folder: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "systemd").symlink_to(short_folder)
    for work in (
        lambda: install(image, HEARTH, jetson=False),
        lambda: uninstall(image, purge=True),
    ):
        with pytest.raises(HearthError, match="a link leads from"):
            work()
    assert not list(short_folder.iterdir())


def test_what_a_link_of_an_unfinished_install_leads_to_stays_as_it_is(
    image: Place, tmp_path: Path, short_folder: Path
) -> None:
    (short_folder / "shadow").write_text("of the machine")
    (tmp_path / UNIT).parent.mkdir(parents=True)
    (tmp_path / UNIT).with_name(".hearth.service.new").symlink_to(short_folder / "shadow")
    install(image, HEARTH, jetson=None)
    assert (short_folder / "shadow").read_text() == "of the machine"
    assert MARK in (tmp_path / UNIT).read_text()


def test_a_unit_of_ours_that_is_no_text_any_more_is_written_anew(
    image: Place, tmp_path: Path
) -> None:
    install(image, HEARTH, jetson=None)
    with (tmp_path / UNIT).open("ab") as unit:
        unit.write(b"# caf\xe9\n")
    assert install(image, HEARTH, jetson=None).written == [tmp_path / UNIT]


def test_an_image_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match="there is no folder"):
        install(Place(tmp_path, {}, root=tmp_path / "none"), HEARTH, jetson=False)


def test_an_environment_out_of_reach_is_refused_before_anything_is_laid(
    image: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "hearth"
    command.touch(mode=0o755)
    monkeypatch.setattr(reach, "own_command", lambda: command)
    with pytest.raises(HearthError, match=r"cannot use .* is hidden from it"):
        install(image, None, jetson=False)
    with pytest.raises(HearthError, match="hidden"):
        install(image, Path("/home/u/env/bin/hearth"), jetson=False)
    assert not (tmp_path / "etc").exists()


def test_only_root_installs_for_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for work in (lambda p: install(p, None, jetson=None), lambda p: uninstall(p, purge=False)):
        with pytest.raises(HearthError, match=r"for root .* sudo, or --user"):
            work(Place(tmp_path, {}))


def test_a_user_s_own_service(own: Place, tmp_path: Path) -> None:
    laid = install(own, None, jetson=None)
    units = tmp_path / ".config" / "systemd" / "user"
    assert sorted(laid.written) == [units / "hearth.service", units / "hearth.socket"]
    assert f"ExecStart={reach.own_command()} serve" in (units / "hearth.service").read_text()
    assert (laid.announced, said(own)[0]) == (True, "--user daemon-reload")
    assert laid.next_step == "systemctl --user enable --now hearth.service"
    assert own.socket == f"{tmp_path}/run/hearth/hearth.sock"


def test_a_user_s_own_service_is_stopped_and_forgotten(own: Place, tmp_path: Path) -> None:
    install(own, None, jetson=None)
    cache = tmp_path / ".cache" / "hearth"
    cache.mkdir(parents=True)
    before = len(said(own))
    uninstall(own, purge=False)
    assert said(own)[before:] == [
        "--user disable --now hearth.socket hearth.service",
        "--user daemon-reload",
        "--user reset-failed hearth.socket hearth.service",
    ]
    assert cache.is_dir()
    uninstall(own, purge=True)
    assert not cache.exists()
    assert len(said(own)) == before + 3


def test_a_unit_of_somebody_else_is_not_stopped(own: Place, tmp_path: Path) -> None:
    install(own, None, jetson=None)
    socket = tmp_path / ".config" / "systemd" / "user" / "hearth.socket"
    socket.write_text("[Socket]\n")
    uninstall(own, purge=False)
    assert "--user disable --now hearth.service" in said(own)
    assert socket.is_file()


def test_units_of_all_users_in_an_image(tmp_path: Path) -> None:
    place = Place(tmp_path, {"XDG_CONFIG_HOME": "/elsewhere"}, root=tmp_path, user=True)
    laid = install(place, HEARTH, jetson=None)
    assert {path.parent for path in laid.written} == {tmp_path / "etc/systemd/user"}
    assert laid.next_step == f"systemctl --global --root={tmp_path} enable hearth.service"


def test_the_example_has_every_setting_and_changes_none(image: Place) -> None:
    install(image, HEARTH, jetson=False)
    text = image.settings.read_text()
    assert not text.startswith(MARK)
    assert load_settings(image.settings, {}) == Settings()
    names = re.findall(r"^# (\w+) = ", text, re.MULTILINE)
    assert sorted(names) == sorted(SETTINGS)
    assert names == [name for names in GROUPS.values() for name in names], "experts come last"
    lines = re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)
    image.settings.write_text("\n".join(lines))
    assert load_settings(image.settings, {}) == Settings()
