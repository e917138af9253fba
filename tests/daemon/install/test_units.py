"""The units as they are shipped, by what systemd itself says of them."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hearth.daemon.configuration.settings import Settings
from hearth.daemon.exit_codes import CONFIGURATION, EXECUTOR_STUCK
from hearth.daemon.install.files import MARK, filled, sources

UNITS = ["hearth.service", "hearth.socket", "user/hearth.service", "user/hearth.socket"]
DROP_IN = "jetson.conf"
JETPACK_6 = 249
"""The version of systemd in which a key came, by its NEWS; 230 stands for all before."""
SINCE = {
    230: "After Also CapabilityBoundingSet Description DeviceAllow DevicePolicy DirectoryMode "
    "Environment ExecReload ExecStart Group KillMode LimitNOFILE ListenStream NoNewPrivileges "
    "NotifyAccess PrivateTmp ProtectHome ProtectSystem RemoveOnStop Requires Restart "
    "RestartPreventExitStatus RestartSec RestrictAddressFamilies RuntimeDirectory "
    "RuntimeDirectoryMode SocketGroup SocketMode SocketUser StartLimitBurst StartLimitIntervalSec "
    "SupplementaryGroups SystemCallArchitectures SystemCallErrorNumber SystemCallFilter "
    "TimeoutStartSec TimeoutStopSec Type UMask User WantedBy Wants WatchdogSec",
    231: "MemoryMax RestrictRealtime",
    232: "ProtectControlGroups ProtectKernelModules RemoveIPC",
    233: "RestrictNamespaces",
    235: "CacheDirectory CacheDirectoryMode IPAddressAllow IPAddressDeny LockPersonality "
    "RuntimeDirectoryPreserve StateDirectory StateDirectoryMode",
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
    lay_units(tmp_path, "hearth.service", "hearth.socket")
    (tmp_path / "hearth.service.d").mkdir()
    lay_units(tmp_path / "hearth.service.d", DROP_IN)
    found = analyze("verify", "./hearth.service", "./hearth.socket", folder=tmp_path)
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
def test_the_service_is_closed_as_far_as_cuda_allows(tmp_path: Path) -> None:
    lay_units(tmp_path, "hearth.service")
    options = ("--offline=yes", "--threshold=25", "--json=short")
    found = analyze("security", *options, "./hearth.service", folder=tmp_path)
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
