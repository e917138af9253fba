import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from hearth.daemon.configuration.load import load_settings
from hearth.daemon.configuration.settings import GROUPS, SETTINGS, Settings
from hearth.daemon.exit_codes import CONFIGURATION, EXECUTOR_STUCK
from hearth.daemon.install import service
from hearth.daemon.install.files import MARK, filled, sources
from hearth.daemon.install.place import Place
from hearth.daemon.install.service import (
    HIDDEN,
    check_name,
    check_place,
    check_reach,
    install,
    own_command,
    own_parts,
    uninstall,
)
from hearth.runtime.errors import HearthError

HEARTH = Path("/opt/hearth/bin/hearth")
UNIT = "etc/systemd/system/hearth.service"
HTTP_UNIT = "etc/systemd/system/hearth-http.service"
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
        HTTP_UNIT,
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
    assert install(image, HEARTH, jetson=False).written == [tmp_path / UNIT, tmp_path / HTTP_UNIT]


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
    monkeypatch.setattr(service, "own_command", lambda: command)
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
    assert f"ExecStart={own_command()} serve" in (units / "hearth.service").read_text()
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


@pytest.fixture
def environment(short_folder: Path) -> Path:
    """The command of an environment that everybody can run; nothing on the way is closed."""
    command = short_folder / "env" / "bin" / "hearth"
    command.parent.mkdir(parents=True)
    command.write_text("")
    for path in (
        command,
        *(folder for folder in command.parents if short_folder in folder.parents),
    ):
        path.chmod(0o755)
    short_folder.chmod(0o755)
    return command


def refusal(command: Path, parts: list[Path], hidden: tuple[Path, ...] = ()) -> str:
    with pytest.raises(HearthError) as caught:
        check_reach(command, parts, hidden)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "hearth")
    assert "python3 -m venv /opt/hearth" in caught.value.message
    return caught.value.message


def test_what_others_can_run_the_service_can(environment: Path) -> None:
    check_reach(environment, [environment], ())


def test_a_folder_that_is_closed_to_others_is_named(environment: Path) -> None:
    closed = environment.parent.parent
    closed.chmod(0o750)
    assert f"cannot use {environment} ({closed} is closed to others)" in refusal(environment, [])


def test_a_file_that_others_may_not_read_is_named(environment: Path) -> None:
    module = environment.with_name("module.py")
    module.touch(mode=0o640)
    assert f"({module} is closed to others)" in refusal(environment, [module])


def test_links_are_followed_to_where_they_lead(environment: Path) -> None:
    """As an environment's python is a link to the one that it was made of."""
    real = environment.parents[2] / "own" / "python" / "bin" / "python3"
    real.parent.mkdir(parents=True)
    real.touch(mode=0o755)
    alias = environment.with_name("alias")
    alias.symlink_to("../../own/python", target_is_directory=True)
    python = environment.with_name("python")
    python.symlink_to("alias/bin/python3")
    check_reach(environment, [python], ())
    home = environment.parents[2] / "own"
    assert "is hidden from it" in refusal(environment, [python], (home,))
    home.chmod(0o700)
    assert "own is closed to others" in refusal(environment, [python])


def test_a_home_that_lies_elsewhere_is_hidden_too(environment: Path) -> None:
    link = environment.parents[2] / "home"
    link.symlink_to("env", target_is_directory=True)
    assert "is hidden from it" in refusal(environment, [], (link,))


def test_a_command_that_is_not_there_is_refused(environment: Path) -> None:
    environment.chmod(0o644)
    assert f"there is no command {environment}" in refusal(environment, [])


@pytest.mark.parametrize("folder", HIDDEN)
def test_what_the_unit_hides_is_refused_in_images_too(folder: Path) -> None:
    with pytest.raises(HearthError, match="hidden"):
        check_place(folder / "env" / "bin" / "hearth")
    check_place(Path("/opt/hearth/bin/hearth"))


@pytest.mark.parametrize("name", ["bin/hearth", "/opt/my env/hearth", "/opt/%h/hearth", "/o$x/h"])
def test_a_unit_file_names_plain_paths_alone(name: str) -> None:
    with pytest.raises(HearthError, match="cannot stand in a unit file"):
        check_name(Path(name))
    check_name(Path("/opt/hearth-1.2/bin/hearth"))


def test_the_environment_that_runs_is_known() -> None:
    assert own_command().is_file()
    parts = own_parts()
    assert all(part.is_file() for part in parts)
    # An interpreter may have its library elsewhere than itself.
    assert [part for part in parts if part.name.startswith("libc.so")]


SYSTEM_UNITS = ["hearth.service", "hearth.socket", "hearth-http.service"]
UNITS = [*SYSTEM_UNITS, "user/hearth.service", "user/hearth.socket"]
DROP_IN = "jetson.conf"
JETPACK_6 = 249


"""The version of systemd in which a key came, by its NEWS; 230 stands for all before."""


SINCE = {
    230: "After Also CapabilityBoundingSet Description DeviceAllow DevicePolicy DirectoryMode "
    "Environment ExecReload ExecStart Group KillMode LimitNOFILE ListenStream NoNewPrivileges "
    "NotifyAccess PrivateDevices PrivateTmp ProtectHome ProtectKernelTunables ProtectSystem "
    "RemoveOnStop Requires Restart "
    "RestartPreventExitStatus RestartSec RestrictAddressFamilies RuntimeDirectory "
    "RuntimeDirectoryMode SocketGroup SocketMode SocketUser StartLimitBurst StartLimitIntervalSec "
    "SupplementaryGroups SystemCallArchitectures SystemCallErrorNumber SystemCallFilter "
    "TimeoutStartSec TimeoutStopSec Type UMask User WantedBy Wants WatchdogSec",
    231: "MemoryDenyWriteExecute MemoryMax RestrictRealtime",
    232: "ProtectControlGroups ProtectKernelModules RemoveIPC",
    233: "RestrictNamespaces",
    235: "CacheDirectory CacheDirectoryMode DynamicUser IPAddressAllow IPAddressDeny "
    "LockPersonality RuntimeDirectoryPreserve StateDirectory StateDirectoryMode",
    242: "ProtectHostname RestrictSUIDSGID",
    243: "OOMPolicy",
    244: "ProtectKernelLogs",
    245: "ProtectClock",
}
ANALYZE = shutil.which("systemd-analyze") or ""
needs_systemd = pytest.mark.skipif(not ANALYZE, reason="there is no systemd-analyze")


def lines(source: str) -> list[tuple[str, str]]:
    text = filled(source, Path("/bin/true"))
    return re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)


def analyze(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    return subprocess.run(
        [ANALYZE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environ,
    )


def lay_units(folder: Path, *names: str) -> None:
    for name in names:
        (folder / Path(name).name).write_text(filled(name, Path("/bin/true")))


@pytest.mark.parametrize("source", [*UNITS, DROP_IN])
def test_no_key_is_newer_than_jetpack_6(source: str) -> None:
    since = {key: version for version, keys in SINCE.items() for key in keys.split()}
    assert {key: since[key] for key, _ in lines(source) if since[key] > JETPACK_6} == {}


@needs_systemd
def test_the_units_of_the_system_are_right(tmp_path: Path) -> None:
    lay_units(tmp_path, *SYSTEM_UNITS)
    (tmp_path / "hearth.service.d").mkdir()
    lay_units(tmp_path / "hearth.service.d", DROP_IN)
    found = analyze("verify", *(f"./{name}" for name in SYSTEM_UNITS), folder=tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@needs_systemd
def test_the_units_of_a_user_are_right(tmp_path: Path) -> None:
    lay_units(tmp_path, "user/hearth.service", "user/hearth.socket")
    found = analyze("--user", "verify", "./hearth.service", "./hearth.socket", folder=tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@needs_systemd
def test_the_check_itself_finds_what_is_wrong(tmp_path: Path) -> None:
    """Which its exit code would not tell."""
    unit = filled("hearth.service", Path("/bin/true"))
    (tmp_path / "hearth.service").write_text(unit.replace("MemoryMax", "MemoryMost"))
    assert "MemoryMost" in analyze("verify", "./hearth.service", folder=tmp_path).stderr


@needs_systemd
@pytest.mark.parametrize(("unit", "most"), [("hearth.service", 25), ("hearth-http.service", 20)])
def test_the_services_are_closed_as_far_as_they_can_be(
    tmp_path: Path, unit: str, most: int
) -> None:
    lay_units(tmp_path, unit)
    options = ("--offline=yes", f"--threshold={most}", "--json=short")
    found = analyze("security", *options, f"./{unit}", folder=tmp_path)
    rows = [row for row in json.loads(found.stdout) if row["set"] is False]
    assert found.returncode == 0, rows


@pytest.mark.parametrize("source", ["hearth.service", "user/hearth.service"])
def test_the_service_stops_as_the_daemon_wants_to_be_stopped(source: str) -> None:
    """The daemon alone gets the signal, and time to drain and to end its executor."""
    unit = dict(lines(source))
    assert (unit["Type"], unit["KillMode"]) == ("notify", "mixed")
    assert float(unit["TimeoutStopSec"]) > Settings().drain_s + 15
    assert unit["RestartPreventExitStatus"].split() == [str(EXECUTOR_STUCK), str(CONFIGURATION)]
    assert (unit["Restart"], unit["OOMPolicy"]) == ("on-failure", "continue")
    assert unit["MemoryMax"].endswith("%")
    assert unit["RuntimeDirectoryPreserve"] == "yes"


def test_service_and_socket_agree_on_the_folder_that_is_made_for_both() -> None:
    service, socket = dict(lines("hearth.service")), dict(lines("hearth.socket"))
    folder = Path(socket["ListenStream"]).parent
    assert folder == Path("/run") / service["RuntimeDirectory"]
    mode = service["RuntimeDirectoryMode"]
    owner = [service["User"], service["Group"]]
    assert owner == [socket["SocketUser"], socket["SocketGroup"]]
    assert socket["SocketMode"] == "0660"
    line = (sources() / "tmpfiles.conf").read_text().splitlines()[-1]
    assert line.split() == ["d", str(folder), mode, *owner, "-"]


def test_every_file_says_whose_it_is() -> None:
    found = [path for path in sources().rglob("*") if path.is_file()]
    assert len(found) == len(UNITS) + 3
    assert all(path.read_text().startswith(MARK) for path in found)


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="there is no systemd-sysusers")
@pytest.mark.skipif(os.geteuid() != 0, reason="systemd-sysusers takes roots of images from root")
def test_the_user_is_in_the_groups_of_the_devices(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", str(sources() / "sysusers.conf")]
    subprocess.run(command, check=True, capture_output=True)
    (user,) = (tmp_path / "etc" / "passwd").read_text().splitlines()
    assert (user.split(":")[0], user.split(":")[5]) == ("hearth", "/var/lib/hearth")
    rows = [line.split(":") for line in (tmp_path / "etc" / "group").read_text().splitlines()]
    groups = {row[0]: row[3] for row in rows}
    assert groups == {"hearth": "", "video": "hearth", "render": "hearth"}
