from pathlib import Path

import pytest
from click.testing import CliRunner

from hearth.daemon.cli.install import install, uninstall
from hearth.daemon.install import manager

IMAGE = ["--hearth", "/opt/hearth/bin/hearth", "--root"]


def test_it_ends_with_the_socket_and_what_comes_next(tmp_path: Path) -> None:
    said = CliRunner().invoke(install, [*IMAGE, str(tmp_path)])
    assert said.exit_code == 0
    lines = said.output.splitlines()
    assert f"wrote {tmp_path}/etc/systemd/system/hearth.service" in lines
    assert lines[-2] == "socket: /run/hearth/hearth.sock, for members of the group hearth"
    assert lines[-1].startswith("next: systemd-sysusers")


def test_what_was_removed_is_told(tmp_path: Path) -> None:
    CliRunner().invoke(install, [*IMAGE, str(tmp_path)])
    said = CliRunner().invoke(uninstall, ["--root", str(tmp_path)]).output.splitlines()
    assert f"removed {tmp_path}/etc/systemd/system/hearth.service" in said
    again = CliRunner().invoke(uninstall, ["--root", str(tmp_path)])
    kept = f"left {tmp_path}/etc/hearth: --purge removes it too"
    assert (again.exit_code, again.output) == (0, f"there was nothing to remove\n{kept}\n")
    assert kept in said


def test_without_a_manager_it_says_what_is_done_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(manager, "runs", lambda *_, **__: False)
    said = CliRunner().invoke(install, ["--user"])
    assert said.exit_code == 1
    assert (tmp_path / ".config/systemd/user/hearth.service").is_file()
    assert "the files are in place, but systemd does not run" in said.output


@pytest.mark.parametrize(
    "arguments", [["--hearth", "/opt/hearth/bin/hearth"], ["--user", "--jetson"]]
)
def test_an_option_that_would_do_nothing_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(install, arguments).exit_code == 2
