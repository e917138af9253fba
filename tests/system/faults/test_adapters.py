from pathlib import Path

import pytest

from tests.bench.running import run
from tests.system.faults.command import faults

pytestmark = pytest.mark.slow
ROW = "Adapter removed, executor killed with one"


def test_who_waits_for_an_adapter_is_told_or_served() -> None:
    code, figures = run(ROW, "unknown adapter", command=faults)
    assert (code, figures["survived"], figures["of"], figures["lost"]) == (0, 2, 2, 0)
    row = figures["rows"][ROW]
    assert row["removed_codes"] == ["adapter_unknown"]
    assert row["killed_codes"] == ["executor_failed"]
    assert row["adapters_then"] == ["adapter-1"]


def test_the_row_needs_an_engine_that_takes_adapters(toy: Path) -> None:
    code, figures = run(ROW, "--engine", str(toy), command=faults)
    assert (code, figures["of"]) == (0, 0)
    assert figures["not_run"][ROW] == "the engine takes no adapters"
