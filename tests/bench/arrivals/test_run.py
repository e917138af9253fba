import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from hearth.bench.__main__ import bench
from hearth.bench.arrivals import run as arrivals
from hearth.bench.arrivals.figures import ArrivalFigures
from hearth.bench.arrivals.run import LOADS, MODES, SATURATED
from hearth.daemon.cli.errors import Failure
from tests.bench.running import run

pytestmark = pytest.mark.slow
WHOLE = ["whole_p99_ms", "whole_longest_ms", "ideal_whole_p99_ms", "ideal_whole_longest_ms"]
GAPS = ["gap_p99_ms", "gap_longest_ms"]
TIMES = ["ttft_p50_ms", "ttft_p99_ms", "ideal_p50_ms", "ideal_p99_ms", *WHOLE, *GAPS]
NAMES = ["offered", *TIMES, "tokens_per_s", "places_used"]
FAULTS = ("lost", "doubled", "disordered", "failed", "misended")


def test_every_token_of_every_load_is_checked_and_figures_come_by_mode_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    record = tmp_path / "record.json"
    asked = [part for mode in MODES for part in ("--mode", mode)]
    asked += ["--load", "0.5", "--load", SATURATED, "--record", str(record), "--name", "quick"]
    _, figures = run("load", "--arrivals", "poisson", "--seconds", "1", "--step-ms", "4", *asked)
    assert set(figures) == {*MODES, "full_house_tokens_per_s"}
    # Eight rows a step, which cannot be faster than it sleeps.
    assert 0 < figures["full_house_tokens_per_s"] <= 2000
    house = figures["full_house_tokens_per_s"]
    kept = json.loads(record.read_bytes())["figures"]
    assert kept["quick/full_house_tokens_per_s"] == house
    for mode, load in product(MODES, ("0.5", SATURATED)):
        found = figures[mode][load]
        assert kept[f"quick/{mode}/{load}"] == found
        assert [found[name] for name in FAULTS] == [0] * len(FAULTS)
        assert found["tokens"] >= 20 * found["requests"]
        assert set(NAMES) <= set(found)
        assert 0 < found["ideal_p50_ms"] <= found["ideal_p99_ms"]
        assert 0 < found["ttft_p50_ms"] <= found["ttft_p99_ms"]
        assert found["decode_ms"] >= 4
        assert 1 <= found["places_used"] <= 8
        offered = max(1, round(0.5 * house / 100))
        assert found["offered"] == (None if load == SATURATED else pytest.approx(offered))


def test_the_loads_and_modes_are_those_that_are_compared() -> None:
    assert LOADS == ("0.5", "0.8", "0.95", "saturated")
    assert MODES == ("joining", "synchronous")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seconds", "3"), "--seconds goes with --arrivals"),
        (("--load", "0.5"), "--load goes with --arrivals"),
        (("--prefill-budget", "2"), "--prefill-budget goes with --arrivals"),
        (("--arrivals", "poisson", "--requests", "3"), "--requests goes without --arrivals"),
        (("--arrivals", "poisson", "--max-tokens", "3"), "--max-tokens goes without --arrivals"),
        (("--name", "a"), "--name is for --record"),
        (
            ("--arrivals", "poisson", "--engine", ".", "--step-ms", "3"),
            "--step-ms and --prefill-us are for the simulated engine",
        ),
    ],
)
def test_an_option_of_the_other_way_is_refused(flags: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(bench, ["load", *flags])
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(("given", "budget"), [((), "1.0"), (("--prefill-budget", "2.5"), "2.5")])
def test_the_daemon_gets_the_budget(
    given: tuple[str, ...], budget: str, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def note(_engine: Path, flags: Sequence[str]) -> NoReturn:
        seen.extend(flags)
        raise Failure("no daemon")

    monkeypatch.setattr(arrivals, "own_daemon", note)
    asked = ["load", "--arrivals", "poisson", "--engine", str(toy), *given]
    assert CliRunner().invoke(bench, asked).exit_code != 0
    assert seen[seen.index("--prefill-budget") + 1] == budget


def figures(**changes: float) -> ArrivalFigures:
    times = dict.fromkeys(
        [*NAMES, "ideal_tokens_per_s", "decode_ms", "prefill_ms", "late_p99_ms"], 2.0
    )
    return ArrivalFigures(**(times | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"late_p99_ms": 1.0}, 0, ""),
        (
            {"late_p99_ms": 1.1, "ttft_p99_ms": 10.0},
            1,
            "joining/0.5: the clients were late themselves",
        ),
        ({"lost": 1}, 1, "joining/0.5: tokens were lost or wrong"),
    ],
)
def test_late_clients_and_wrong_tokens_fail_the_bench(
    changes: dict[str, float], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arrivals._judge({"joining/0.5": figures(**changes)}) == code
    assert said in capsys.readouterr().err
