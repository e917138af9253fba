import re

import msgspec

from hearth.bench.report import Recorded
from tests.system.faults.rows import FAULTS, HELD, INPUTS, NOT_RUN
from tests.system.page import FIGURES, LOADS, PAGE, fault_text, fill


def sections() -> dict[str, list[str]]:
    """The names of the rows below each heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    names = [re.findall(r"^\| \*\*(.+?)\*\*", part, re.MULTILINE) for part in parts[2::2]]
    return dict(zip(parts[1::2], names, strict=True))


def test_the_page_has_every_row_of_the_bench_and_no_other() -> None:
    faults = {row.name for row in FAULTS} | {"Abort races", "systemd"}
    assert set(sections()["Faults survived"]) == faults
    inputs = {row.name for row in INPUTS} | {"Weights that do not fit"}
    assert set(sections()["Bad inputs tried"]) == inputs
    assert set(sections()["Load held"]) == {*LOADS, "Hop cost", *(row.name for row in HELD)}
    assert set(NOT_RUN) == {"Abort races", "systemd", "Weights that do not fit"}


def test_the_page_has_the_figures_that_were_recorded() -> None:
    recorded = msgspec.json.decode(FIGURES.read_bytes(), type=Recorded)
    assert fill(PAGE.read_text(), recorded) == PAGE.read_text()
    tried = {key for key in recorded.figures if key.startswith("faults/")}
    assert tried <= {f"faults/{row.name}" for row in (*HELD, *FAULTS, *INPUTS)}
    assert recorded.figures["faults"]["lost"] == 0


def test_a_row_that_was_not_survived_says_so_first() -> None:
    row = {"survived": False, "limit": "x", "seconds": 1.0, "broken": ["it fell"], "a_ms": [1, 2]}
    assert fault_text(row) == "**not survived**: it fell; a ms: 1, 2"
