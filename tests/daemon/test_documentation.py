import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import structlog

from hearth.daemon import exit_codes
from hearth.daemon.cli import cli
from hearth.daemon.cli.errors import UNREAD, USAGE
from hearth.daemon.configuration.settings import SETTINGS, Setting
from hearth.daemon.configuration.words import allowed, shown
from hearth.daemon.exit_codes import (
    CONFIGURATION,
    EXECUTOR_FAILED,
    EXECUTOR_STUCK,
    FAILED,
    exit_code,
    reason_of,
)
from hearth.runtime.errors import CODES, Code, HearthError

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    lines = (DOCS / "configuration.md").read_text().splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def expected(setting: Setting) -> str:
    declared = setting.declared
    letters = ["r"] * declared.reloads + ["e"] * declared.expert
    mark = f" ({', '.join(letters)})" if letters else ""
    values = allowed(setting.type, declared.form)
    parts = (f"`{setting.name}`{mark}", f"`{shown(setting.default)}`", values)
    return f"| {' | '.join(parts)} | {declared.description} |"


@pytest.mark.parametrize("name", SETTINGS)
def test_the_documentation_has_every_setting_as_it_is(name: str, rows: dict[str, str]) -> None:
    assert rows[name] == expected(SETTINGS[name])


def test_the_documentation_has_no_other_setting(rows: dict[str, str]) -> None:
    assert set(rows) == set(SETTINGS)


def test_the_protocol_page_points_to_the_specification() -> None:
    assert "clients/PROTOCOL.md" in (DOCS / "protocol.md").read_text()


def commands(text: str) -> Iterator[click.Context]:
    """What the page's lines `$ hearth ...` ask for, parsed as the command line is."""
    for line in re.findall(r"^\$ hearth (.+)$", text, re.MULTILINE):
        name, *arguments = shlex.split(line, comments=True)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        yield command.make_context(name, arguments)


@pytest.mark.parametrize("page", ["operations.md", "install.md"])
def test_the_lines_of_a_page_can_be_typed_in_their_order(page: str) -> None:
    text = (DOCS / page).read_text()
    made = {None, ""}
    for asked in commands(text):
        made.add(str(asked.params.get("target", "")))
        assert asked.params.get("engine") in made, "no line above makes this engine"
    assert len(made) > 2
    assert "bin/activate" in text.partition("$ hearth serve")[0]


def test_the_page_of_the_service_has_commands_that_can_be_typed() -> None:
    text = (DOCS / "service.md").read_text()
    asked = list(
        commands(re.sub(r"^\$ (sudo )?(\S+/)?hearth ", "$ hearth ", text, flags=re.MULTILINE))
    )
    assert len(asked) > 3


if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_every_exit_code_stands_in_the_table() -> None:
    table = OPERATIONS.read_text().split("## Exit codes")[1].split("\n## ")[0]
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    ours = {value for name, value in vars(exit_codes).items() if name.isupper() and name[0] != "_"}
    assert documented == ours | {USAGE, UNREAD}


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("executor_failed", EXECUTOR_FAILED),
        ("executor_stuck", EXECUTOR_STUCK),
        ("invalid_value", CONFIGURATION),
        ("engine_corrupt", CONFIGURATION),
        ("weights_invalid", CONFIGURATION),
        ("already_running", FAILED),
        ("internal", FAILED),
    ],
)
def test_a_service_manager_can_tell_failures_apart(code: Code, number: int) -> None:
    assert exit_code(HearthError(code, "it failed")) == number


def test_only_known_codes_have_a_number_of_their_own() -> None:
    assert set(exit_codes._CODES) <= CODES


def test_the_error_of_a_part_is_found_wherever_it_was_raised() -> None:
    cause = HearthError("queue_full", "behind")
    group = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [cause])])
    assert reason_of(group) is cause


def test_an_unforeseen_error_becomes_internal_and_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        assert reason_of(ValueError("x")).code == "internal"
    assert logs[0]["log_level"] == "error"
    assert isinstance(logs[0]["exc_info"], ValueError)
