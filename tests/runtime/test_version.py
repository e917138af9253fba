import re
from pathlib import Path

from runtime.version import VERSION


def test_the_package_has_this_version() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    stated = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert stated is None or stated[1] == VERSION
