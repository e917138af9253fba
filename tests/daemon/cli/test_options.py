from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hearth.daemon.cli.options import settings_from, settings_options
from hearth.daemon.configuration.load import OLD_NAMES
from hearth.daemon.configuration.settings import SETTINGS, Settings, flag_of
from hearth.runtime.errors import HearthError


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


def test_every_setting_has_a_flag() -> None:
    @click.command()
    @settings_options()
    def command(**_flags: Any) -> None: ...

    flags = {option for parameter in command.params for option in parameter.opts}
    assert {flag_of(name) for name in (*SETTINGS, *OLD_NAMES)} | {"--config"} == flags


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
