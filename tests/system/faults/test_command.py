import pytest

from tests.bench.running import run
from tests.system.faults import command
from tests.system.faults.rows import Row
from tests.system.faults.trial import Trial

pytestmark = pytest.mark.slow


def test_quick_rows_are_survived_and_measured() -> None:
    code, figures = run("same bad request", "same identity", command=command.faults)
    assert (code, figures["survived"], figures["of"], figures["lost"]) == (0, 2, 2, 0)
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


def test_what_is_not_survived_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("Loses", "what", "limit", loses), Row("Breaks", "what", "limit", breaks)]
    monkeypatch.setattr(command, "ROWS", rows)
    code, figures = run(command=command.faults)
    assert (code, figures["survived"], figures["of"], figures["lost"]) == (1, 0, 2, 1)
    assert figures["rows"]["Loses"]["broken"] == ["seconds_to_wait is 2, above 1"]
    assert figures["rows"]["Loses"]["lost"] == figures["rows"]["Loses"]["requests"] == 1
    assert figures["rows"]["Breaks"]["broken"] == ["KeyError: 'code'"]
