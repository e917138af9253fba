from pathlib import Path

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.image_processing.headers import read_header
from tests.bench.running import run
from tests.system.faults import command
from tests.system.faults.bad_pictures import _bad_pictures
from tests.system.faults.command import faults
from tests.system.faults.rows import Row
from tests.system.faults.trial import Trial
from tests.vision_models import write_vision_model


@pytest.mark.slow
def test_quick_rows_are_survived_and_measured() -> None:
    quick = ("same bad request", "same identity", "second daemon", "at the limit", "special tokens")
    code, figures = run(*quick, command=command.faults)
    assert (code, figures["survived"], figures["of"], figures["lost"]) == (0, 5, 5, 0)
    assert figures["rows"]["Same bad request twice"]["refusals"][1] == [
        "invalid_value",
        "max_tokens",
    ]
    assert figures["rows"]["Client reconnects with the same identity"]["tokens"] == 60


def loses(trial: Trial) -> None:
    """A row that hangs up before its requests have ended, beside a figure above its limit."""
    with trial.client(trial.shared()) as client:
        client.generate("a", max_tokens=1000)
    trial.at_most("seconds_to_wait", 2.0, 1.0)


def breaks(_trial: Trial) -> None:
    """A row in which the daemon answers what nobody expected."""
    raise KeyError("code")


@pytest.mark.slow
def test_what_is_not_survived_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("Loses", "what", "limit", loses), Row("Breaks", "what", "limit", breaks)]
    monkeypatch.setattr(command, "ROWS", rows)
    code, figures = run(command=command.faults)
    assert (code, figures["survived"], figures["of"], figures["lost"]) == (1, 0, 2, 1)
    assert figures["rows"]["Loses"]["broken"] == ["seconds_to_wait is 2, above 1"]
    assert figures["rows"]["Loses"]["lost"] == figures["rows"]["Loses"]["requests"] == 1
    assert figures["rows"]["Breaks"]["broken"] == ["KeyError: 'code'"]


ROW = "Adapter removed, executor killed with one"


@pytest.mark.slow
def test_who_waits_for_an_adapter_is_told_or_served() -> None:
    code, figures = run(ROW, "unknown adapter", command=faults)
    assert (code, figures["survived"], figures["of"], figures["lost"]) == (0, 2, 2, 0)
    row = figures["rows"][ROW]
    assert row["removed_codes"] == ["adapter_unknown"]
    assert row["killed_codes"] == ["executor_failed"]
    assert row["adapters_then"] == ["adapter-1"]


@pytest.mark.slow
def test_the_row_needs_an_engine_that_takes_adapters(toy: Path) -> None:
    code, figures = run(ROW, "--engine", str(toy), command=faults)
    assert (code, figures["of"]) == (0, 0)
    assert figures["not_run"][ROW] == "the engine takes no adapters"


def test_the_pictures_are_what_they_are_called() -> None:
    bad = {one.name: one for one in _bad_pictures()}
    assert len(bad["100 megapixels"].data) < 50_000
    with pytest.raises(HearthError, match="10000 x 10000"):
        read_header(memoryview(bad["100 megapixels"].data))
    assert len(bad["bomb in a text chunk"].data) < 100_000
    wrong = read_header(memoryview(bad["another size than its header's"].data))
    assert (wrong.width, wrong.height) == (640, 480)
    long = read_header(memoryview(bad["1x10000"].data))
    assert (long.width, long.height) == (1, 10_000)


@pytest.mark.slow
def test_a_row_about_pictures_needs_a_model_that_sees(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    export_model(model, tmp_path / "engine", ExportOptions(max_batch=2, capacity=1024))
    seeing = ("--seeing", str(tmp_path / "engine"))
    code, figures = run("their places", *seeing, command=faults)
    assert (code, figures["survived"], figures["lost"]) == (0, 1, 0)
    row = figures["rows"]["Images and their places"]
    assert row["placeholders"] > 0
    assert row["words_and_no_picture"] == "length"
