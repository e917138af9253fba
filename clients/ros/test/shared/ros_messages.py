"""Objects with the fields of our ROS messages, made from their definitions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEFINITIONS = Path(__file__).parents[2] / "hearth_msgs"
_ZERO = {"string": "", "bool": False, "float64": 0.0}


def fields(name: str, part: int = 0) -> dict[str, str]:
    """Types of a definition's fields by name; `part` counts what lines of --- part."""
    (path,) = DEFINITIONS.rglob(f"{name}.*")
    text = path.read_text(encoding="utf-8").split("---\n")[part]
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return {line[1]: line[0] for line in lines if line}


def make(name: str, /, **values: Any) -> SimpleNamespace:
    """A message, its other fields zero or empty."""
    found = {
        key: [] if kind.endswith("[]") else _ZERO.get(kind, 0) for key, kind in fields(name).items()
    }
    assert values.keys() <= found.keys()
    return SimpleNamespace(**(found | values))
