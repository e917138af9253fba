import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from daemon.cli import cli
from daemon.configuration.settings import FIELDS
from daemon.configuration.words import allowed, description, shown
from daemon.reload import RELOADABLE

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    lines = (DOCS / "configuration.md").read_text().splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def expected(field: msgspec.structs.FieldInfo) -> str:
    mark = " (r)" if field.name in RELOADABLE else ""
    parts = (f"`{field.name}`{mark}", f"`{shown(field.default)}`", allowed(field.type))
    return f"| {' | '.join(parts)} | {description(field.type)} |"


@pytest.mark.parametrize("name", FIELDS)
def test_the_documentation_has_every_setting_as_it_is(name: str, rows: dict[str, str]) -> None:
    assert rows[name] == expected(FIELDS[name])


def test_the_documentation_has_no_other_setting(rows: dict[str, str]) -> None:
    assert set(rows) == set(FIELDS)


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
