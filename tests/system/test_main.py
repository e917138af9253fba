import re
import sys
from pathlib import Path

import click
import msgspec
import pytest

from hearth.bench.report import Recorded, read_record
from tests.system import __main__ as system
from tests.system.__main__ import chosen, main
from tests.system.faults import command
from tests.system.faults.rows import FAULTS, HELD, INPUTS, NOT_RUN, Row
from tests.system.faults.trial import Trial
from tests.system.page import FIGURES, LOADS, PAGE, fault_text, fill


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["soak", "--seconds", "3"], ["soak --seconds 3"]),
        (["priority", "--json"], ["overload priority --json"]),
        (["SIGTERM", "--json"], ["faults SIGTERM --json"]),
        (["--json"], ["faults --json", "overload --json", "soak --json"]),
        ([], ["faults", "overload", "soak"]),
        (["--help"], ["--help"]),
    ],
)
def test_a_row_is_found_by_its_name(arguments: list[str], lines: list[str]) -> None:
    assert [" ".join(line) for line in chosen(arguments)] == lines


def test_all_run_and_the_first_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"faults": 0, "overload": 1, "soak": 0}
    ran: list[str] = []

    def named(name: str) -> click.Command:
        def callback() -> int:
            ran.append(name)
            return codes[name]

        return click.Command(name, callback=callback)

    monkeypatch.setattr(system, "RUNS", {name: named(name) for name in codes})
    assert main([]) == 1
    assert ran == list(codes)


def test_rows_are_recorded_beside_those_of_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def survives(trial: Trial) -> None:
        trial.expect("answer", 1, 1)

    rows = [Row(name, "what", "limit", survives) for name in ("First", "Second")]
    monkeypatch.setattr(command, "ROWS", rows)
    file = tmp_path / "record.json"
    for commit, names in (("one", ()), ("two", ("Second",))):
        monkeypatch.setenv("BENCH_COMMIT", commit)
        arguments = [*names, "--engine", str(tmp_path), "--record", str(file)]
        monkeypatch.setattr(sys, "argv", ["system", *arguments])
        assert main(["faults", *arguments]) == 0
    found = read_record(file)
    assert found is not None
    assert list(found.figures) == ["faults", "faults/First", "faults/Second"]
    commits = {key: found.run_of(key).commit for key in found.figures}
    assert commits == {"faults": "one", "faults/First": "one", "faults/Second": "two"}
    assert found.command == f"python -m tests.system faults Second --engine {tmp_path}"


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
