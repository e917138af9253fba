import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hearth.daemon.cli import serve as module
from hearth.daemon.cli.install import install, uninstall
from hearth.daemon.cli.options import settings_from, settings_options
from hearth.daemon.cli.serve import serve
from hearth.daemon.configuration.settings import GROUPS, SETTINGS, Settings, flag_of, variable_of
from hearth.daemon.exit_codes import CONFIGURATION
from hearth.daemon.install import place
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.service_state import words
from hearth.runtime.errors import HearthError


def test_an_impossible_socket_is_refused_before_an_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "engine_folder", lambda *_unused: pytest.fail("built an engine"))
    arguments = ["--socket", str(tmp_path / ("x" * 110))]
    assert serve.main(arguments, standalone_mode=False) == CONFIGURATION
    assert "at most 107" in capsys.readouterr().err


def test_more_clients_than_open_files_are_refused_before_an_engine_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_folder: Path
) -> None:
    monkeypatch.setattr(module, "engine_folder", lambda *_unused: pytest.fail("built an engine"))
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (100, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, _new: None)
    arguments = ["--socket", str(short_folder / "s")]
    assert serve.main(arguments, standalone_mode=False) == CONFIGURATION
    assert "64 clients need 192 open files" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--host", "--port"])
def test_flags_of_network_servers_are_explained(flag: str) -> None:
    with pytest.raises(click.UsageError, match=f"there is no {flag}: .*--tcp-port"):
        serve.main([flag, "0"], standalone_mode=False)


def test_the_manager_sees_how_the_export_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    bar: list[int] = []
    monkeypatch.setattr(module, "tell_state", lambda state: shown.append(words(*state)))
    advance = module._notifying(lambda _stage, done, _total: bar.append(done))
    for done in range(0, 1001, 4):
        advance("reading weights", done, 1000)
    assert len(bar) == 251
    assert len(shown) == 101
    assert shown[:2] == ["starting: reading weights, 0%", "starting: reading weights, 1%"]


def test_wrong_settings_end_with_the_code_of_the_daemon_wherever_they_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hearth.toml"
    path.write_text("threads = -1")
    assert serve.main(["--config", str(path)], standalone_mode=False) == CONFIGURATION
    assert "threads: -1 is not allowed" in capsys.readouterr().err


def test_an_engine_that_cannot_be_loaded_is_logged_once(
    tiny_engine: Path, tmp_path: Path, short_folder: Path
) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    graph = folder / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"?")
    command = ["serve", "--engine", str(folder), "--socket", str(short_folder / "s")]
    done = subprocess.run(
        [sys.executable, "-m", "hearth.daemon.cli", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CONFIGURATION
    (line,) = done.stderr.splitlines()
    assert "model.onnx was changed after the export" in line


def test_ready_is_told_whatever_the_log_level_is(tiny_engine: Path) -> None:
    with own_daemon(tiny_engine, ["--log-level", "error"]) as daemon:
        (line,) = daemon.log().splitlines()
    assert '"level":"info","event":"ready"' in line


def test_tcp_without_keys_is_refused_before_an_engine_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_folder: Path
) -> None:
    monkeypatch.setattr(module, "engine_folder", lambda *_unused: pytest.fail("built an engine"))
    keys = str(short_folder / "keys")
    arguments = ["--socket", str(short_folder / "s"), "--tcp-port", "7700", "--keys", keys]
    assert serve.main(arguments, standalone_mode=False) == CONFIGURATION
    assert f"make the daemon's by `hearth keys init --keys {keys}`" in capsys.readouterr().err
    arguments = ["--socket", "tcp://127.0.0.1:7700"]
    assert serve.main(arguments, standalone_mode=False) == CONFIGURATION
    assert "the setting for clients on TCP is tcp_port" in capsys.readouterr().err


def flags_of(capsys: pytest.CaptureFixture[str], asked: str) -> set[str]:
    serve.main([asked], standalone_mode=False)
    words = capsys.readouterr().out.split()
    return {flag for name in SETTINGS if (flag := flag_of(name)) in words}


def test_the_help_has_what_guides_need_and_all_of_it_has_every_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everyday, experts = GROUPS.values()
    assert flags_of(capsys, "--help") == set(map(flag_of, everyday))
    assert len(everyday) <= 36
    assert flags_of(capsys, "--help-all") == set(map(flag_of, [*everyday, *experts]))
    assert sorted([*everyday, *experts]) == sorted(SETTINGS)
    serve.main(["--help-all"], standalone_mode=False)
    assert "--drafting-top-k" not in capsys.readouterr().out, "taken, and not shown"


def test_guides_set_nothing_that_only_experts_need() -> None:
    docs = Path(__file__).parents[3] / "docs"
    for page in ("install", "service", "operations", "gpu", "tensorrt", "metrics"):
        fenced = re.findall(
            r"^```.*?^```", (docs / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
        )
        for name in GROUPS["Settings for experts"]:
            asked = rf"serve .*{flag_of(name)}\b|^{name} =|{variable_of(name)}\b"
            assert not [block for block in fenced if re.search(asked, block, re.MULTILINE)], (
                page,
                name,
            )


def given(*arguments: str) -> Settings:
    found: list[Settings] = []

    @click.command()
    @settings_options()
    def command(config: Path | None, **flags: Any) -> None:
        found.append(settings_from(config, flags))

    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    return found[0]


def test_flags_reach_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("verify = false\nthreads = 3\nspin = true")
    settings = given("--config", str(path), "--max-batch", "4", "--no-spin")
    assert (settings.runtime.max_batch, settings.runtime.spin) == (4, False)
    assert (settings.runtime.threads, settings.runtime.verify) == (3, False)


def test_a_wrong_flag_is_wrong_usage_and_names_the_flag() -> None:
    with pytest.raises(click.UsageError, match="--hold-s: 'x' is not allowed"):
        given("--hold-s", "x")


def test_a_wrong_file_is_a_failure_and_no_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("hold_s = 0")
    with pytest.raises(HearthError, match="hold_s: 0 is not allowed"):
        given("--config", str(path), "--threads", "2")


def test_only_the_named_settings_become_flags() -> None:
    @click.command()
    @settings_options("threads", "verify")
    def command(**_flags: Any) -> None: ...

    assert [parameter.name for parameter in command.params] == ["config", "threads", "verify"]


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
    monkeypatch.setattr(place, "manager_runs", lambda *_, **__: False)
    said = CliRunner().invoke(install, ["--user"])
    assert said.exit_code == 1
    assert (tmp_path / ".config/systemd/user/hearth.service").is_file()
    assert "the files are in place, but systemd does not run" in said.output


@pytest.mark.parametrize(
    "arguments", [["--hearth", "/opt/hearth/bin/hearth"], ["--user", "--jetson"]]
)
def test_an_option_that_would_do_nothing_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(install, arguments).exit_code == 2
