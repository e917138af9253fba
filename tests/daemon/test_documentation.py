from pathlib import Path

import msgspec
import pytest

from daemon.configuration.settings import FIELDS
from daemon.configuration.words import allowed, description, shown

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    lines = (DOCS / "configuration.md").read_text().splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def expected(field: msgspec.structs.FieldInfo) -> str:
    parts = (f"`{field.name}`", f"`{shown(field.default)}`", allowed(field.type))
    return f"| {' | '.join(parts)} | {description(field.type)} |"


@pytest.mark.parametrize("name", FIELDS)
def test_the_documentation_has_every_setting_as_it_is(name: str, rows: dict[str, str]) -> None:
    assert rows[name] == expected(FIELDS[name])


def test_the_documentation_has_no_other_setting(rows: dict[str, str]) -> None:
    assert set(rows) == set(FIELDS)


def test_the_protocol_page_points_to_the_specification() -> None:
    assert "clients/PROTOCOL.md" in (DOCS / "protocol.md").read_text()
