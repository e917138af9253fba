import re
from pathlib import Path

import pytest

from hearth.runtime.packages import VERSION, version_numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("10.16.1.11", (10, 16, 1)),
        ("10.0.0b6", (10, 0, 0)),
        ("1.31.1", (1, 31, 1)),
        ("1.24.dev20250101+cu12", (1, 24, 20250101)),
    ],
)
def test_the_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


def test_the_package_has_this_version() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    stated = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert stated is None or stated[1] == VERSION
