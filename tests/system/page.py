"""Writes what was recorded into docs/reliability.md: `python -m tests.system.page`.

A row that begins with the name of a fault, or of a load that is measured, gets its
first cells and its date anew; the rest of the page is written by hand.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hearth.bench.report import Recorded, figure
from tests.system.faults.rows import ROWS

_DOCS = Path(__file__).parents[2] / "docs"
PAGE = _DOCS / "reliability.md"
FIGURES = _DOCS / "figures" / "reliability.json"
LOADS = {
    "Steady": "load",
    "Batch fill": "batch_fill",
    "Overload": "overload",
    "Token-weighted limit": "token_weighted_limit",
    "Priority": "priority",
    "Long and short mixed": "long_and_short_mixed",
    "Soak": "soak",
}
"""Rows of load, and the key of their figures in the record."""
_OTHER_FIELDS = ("survived", "limit", "broken", "requests", "lost", "seconds")
_MEASURED, _DATE = 3, 5


def fill(page: str, recorded: Recorded) -> str:
    """The page with the figures of a record; rows without any stay as they are."""
    rows = {row.name: row for row in ROWS}
    lines = []
    for line in page.splitlines():
        named = re.match(r"\| \*\*(.+?)\*\*", line)
        name = named[1] if named else ""
        cells = line.split(" | ")
        if name in rows:
            cells[0], cells[1] = f"| **{name}**: {rows[name].what}", rows[name].limit
        key = LOADS.get(name, f"faults/{name}")
        if key in recorded.figures:
            found = recorded.figures[key]
            cells[_MEASURED - 1] = figures_text(found) if name in LOADS else fault_text(found)
            cells[_DATE - 1] = recorded.run_of(key).date
        lines.append(" | ".join(cells))
    return "\n".join(lines) + "\n"


def fault_text(row: Mapping[str, Any]) -> str:
    """The figures of a fault in words, first of all if it was not survived."""
    found = figures_text({name: value for name, value in row.items() if name not in _OTHER_FIELDS})
    return found if row["survived"] else f"**not survived**: {'; '.join(row['broken'])}; {found}"


def figures_text(figures: Mapping[str, Any]) -> str:
    """Figures by name, on one line."""
    texts = {name.replace("_", " "): _value_text(value) for name, value in figures.items()}
    return "; ".join(f"{name}: {value}" for name, value in texts.items())


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value_text(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_value_text, value)) or "none"
    return figure(value)


def main() -> None:
    """Write the page."""
    recorded = msgspec.json.decode(FIGURES.read_bytes(), type=Recorded)
    PAGE.write_text(fill(PAGE.read_text(), recorded))


if __name__ == "__main__":
    main()
