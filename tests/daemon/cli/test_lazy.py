import click
import pytest
from click.testing import CliRunner

from hearth.daemon.cli import LazyCommand, LazyGroup


@pytest.fixture
def group() -> LazyGroup:
    commands = {
        "status": LazyCommand("hearth.daemon.cli.status:status", "Show it."),
        "broken": LazyCommand("daemon.no_such_module:x", "Never imported by the help."),
        "wrong": LazyCommand("hearth.daemon.cli.errors:FAILED", "Not a command."),
    }
    return LazyGroup(name="group", commands_by_name=commands, elsewhere={"ps": "status shows it"})


def test_the_help_comes_from_the_table(group: LazyGroup) -> None:
    text = CliRunner().invoke(group, ["--help"]).output
    assert text.index("status  Show it.") < text.index("broken  Never imported by the help.")


def test_a_command_is_imported_when_it_is_used(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["status", "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


def test_a_table_entry_that_is_no_command_is_a_mistake(group: LazyGroup) -> None:
    with pytest.raises(TypeError, match="is not a command"):
        group.get_command(click.Context(group), "wrong")


def test_an_unknown_name_without_a_near_one_is_a_usage_error(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["zzz"])
    assert result.exit_code == 2
    assert "there is no command 'zzz'" in result.output
    assert "nearest" not in result.output


def test_a_name_that_other_tools_have_is_explained(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["ps"])
    assert result.exit_code == 2
    assert "there is no command 'ps': status shows it" in result.output
