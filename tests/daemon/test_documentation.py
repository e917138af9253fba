import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hearth.daemon.cli import cli
from hearth.daemon.configuration.settings import SETTINGS, Setting
from hearth.daemon.configuration.words import allowed, shown

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
