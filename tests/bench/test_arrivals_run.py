import json
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import NoReturn

import pytest
from click.testing import CliRunner

from hearth.bench.__main__ import bench
from hearth.bench.arrivals import run as arrivals
from hearth.bench.arrivals.figures import ArrivalFigures
from hearth.bench.arrivals.ideal import (
    MAX_RANK,
    MEAN_REPLY,
    PROMPT_TOKENS,
    REPLY_TOKENS,
    Ask,
    Workload,
    add_adapters,
    spread,
    write_adapter,
)
from hearth.bench.arrivals.run import MODES, SATURATED, _ratios
from hearth.bench.report import judged
from hearth.daemon.cli.errors import Failure
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.lora.stored import read_peft
from hearth.runtime.text.tokenizer import Tokenizer
from tests.bench.running import run
from tests.conftest import REFERENCE

WHOLE = ["whole_p99_ms", "whole_longest_ms", "ideal_whole_p99_ms", "ideal_whole_longest_ms"]
GAPS = ["gap_p99_ms", "gap_longest_ms"]
TIMES = ["ttft_p50_ms", "ttft_p99_ms", "ideal_p50_ms", "ideal_p99_ms", *WHOLE, *GAPS]
NAMES = ["offered", *TIMES, "tokens_per_s", "places_used"]
FAULTS = ("lost", "doubled", "disordered", "failed", "misended")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert judged(arrivals._faults({"joining/0.5": figures(**changes)})) == code
    assert said in capsys.readouterr().err


@pytest.fixture
def tokenizer(toy: Path) -> Tokenizer:
    return Tokenizer.open(toy)


def test_sizes_are_those_that_were_asked_for(tokenizer: Tokenizer) -> None:
    asks = Workload(tokenizer).first(300)
    for ask in asks:
        assert len(tokenizer.encode(ask.prompt)) == ask.prompt_tokens
    assert {min(a.prompt_tokens for a in asks), max(a.prompt_tokens for a in asks)} == {5, 150}
    assert PROMPT_TOKENS == (5, 150)
    assert REPLY_TOKENS == (20, 180)
    assert all(20 <= ask.tokens <= 180 for ask in asks)
    assert mean(ask.tokens for ask in asks) == pytest.approx(MEAN_REPLY, rel=0.1)


def test_a_prompt_that_merges_letters_is_made_as_long_as_it_must_be() -> None:
    class Pairs:
        def encode(self, text: str) -> list[int]:
            return [1, *(1 for _ in text[::2])]

    (ask,) = Workload(Pairs()).alike(1, 7)  # type: ignore[arg-type]
    assert (len(Pairs().encode(ask.prompt)), ask.prompt_tokens, ask.tokens) == (5, 5, 7)


def test_the_same_requests_come_at_every_load_at_poisson_times(tokenizer: Tokenizer) -> None:
    workload = Workload(tokenizer)
    few, many = workload.poisson(2.0, 20.0), workload.poisson(10.0, 20.0)
    assert (len(few), len(many)) == (40, 200)
    assert [ask.prompt for ask in few] == [ask.prompt for ask in many[:40]]
    assert Workload(tokenizer).poisson(2.0, 20.0) == few
    assert Workload(tokenizer, seed=1).poisson(2.0, 20.0) != few
    times = [ask.at for ask in many]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 20
    # Of Poisson arrivals a fifth comes within a fifth of the mean distance to the one before.
    close = sum(late - early < 0.02 for early, late in pairwise(times))
    assert close / 199 == pytest.approx(0.18, abs=0.08)
    assert len(workload.poisson(0.001, 1.0)) == 1


@pytest.mark.slow
def test_the_adapters_are_what_the_engine_takes(tmp_path: Path) -> None:
    export_model(REFERENCE, tmp_path / "engine", ExportOptions(max_lora_rank=MAX_RANK))
    config = load_config(tmp_path / "engine")
    made = [read_peft(write_adapter(tmp_path / str(seed), config, seed), config) for seed in (0, 1)]
    assert [one.rank for one in made] == [MAX_RANK, MAX_RANK]
    assert {layer for layer, _ in made[0].parts} == set(range(config.num_decoder_layers))
    assert made[0].digest != made[1].digest


@pytest.mark.slow
def test_requests_are_spread_evenly_and_alike_each_time() -> None:
    asks = [Ask(float(at), 5, 20) for at in range(400)]
    given = spread(asks, ["a", "b"])
    assert given == spread(asks, ["a", "b"])
    assert [one._replace(adapter="") for one in given] == asks
    assert 150 < sum(one.adapter == "a" for one in given) < 250
    assert spread(asks, []) == asks
    assert {one.adapter for one in spread(asks, ["a"])} == {"a"}


@pytest.mark.slow
def test_each_load_is_compared_with_itself() -> None:
    found = {
        "joining/0.5": figures(ttft_p99_ms=30.0),
        "joining/0.5/one": figures(ttft_p99_ms=20.0),
    }
    assert _ratios(found) == {"joining/0.5": 1.5}


@pytest.mark.slow
def test_every_token_of_two_adapters_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    asked = ("--mode", "joining", "--load", "0.8", "--seconds", "1", "--step-ms", "2")
    _, found = run("load", "--arrivals", "poisson", "--adapters", "2", *asked)
    for load in ("0.8", "0.8/one"):
        assert found["joining"][load]["lost"] == found["joining"][load]["failed"] == 0
        assert found["joining"][load]["tokens"] > 0
    ratio = found["adapters_ttft_p99_ratio"]["joining/0.8"]
    both = [found["joining"][load]["ttft_p99_ms"] for load in ("0.8", "0.8/one")]
    assert ratio == pytest.approx(both[0] / both[1], rel=1e-3)


@pytest.mark.slow
def test_an_engine_that_takes_none_is_named(toy: Path) -> None:
    with pytest.raises(HearthError, match="no daemon"):
        add_adapters(toy / "hearth.sock", load_config(toy), 1)
