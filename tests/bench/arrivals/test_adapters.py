from pathlib import Path

import pytest

from bench.arrivals.adapters import MAX_RANK, add_adapters, spread, write_adapter
from bench.arrivals.run import _ratios
from bench.arrivals.workload import Ask
from runtime.adapters.peft import read_peft
from runtime.config import load_config
from runtime.errors import HearthError
from runtime.export import ExportOptions, export_model
from tests.bench.arrivals.test_run import figures
from tests.bench.conftest import REFERENCE
from tests.bench.running import run

pytestmark = pytest.mark.slow


def test_the_adapters_are_what_the_engine_takes(tmp_path: Path) -> None:
    export_model(REFERENCE, tmp_path / "engine", ExportOptions(max_lora_rank=MAX_RANK))
    config = load_config(tmp_path / "engine")
    made = [read_peft(write_adapter(tmp_path / str(seed), config, seed), config) for seed in (0, 1)]
    assert [one.rank for one in made] == [MAX_RANK, MAX_RANK]
    assert {layer for layer, _ in made[0].parts} == set(range(config.num_decoder_layers))
    assert made[0].digest != made[1].digest


def test_requests_are_spread_evenly_and_alike_each_time() -> None:
    asks = [Ask(float(at), 5, 20) for at in range(400)]
    given = spread(asks, ["a", "b"])
    assert given == spread(asks, ["a", "b"])
    assert [one._replace(adapter="") for one in given] == asks
    assert 150 < sum(one.adapter == "a" for one in given) < 250
    assert spread(asks, []) == asks
    assert {one.adapter for one in spread(asks, ["a"])} == {"a"}


def test_each_load_is_compared_with_itself() -> None:
    found = {
        "joining/0.5": figures(ttft_p99_ms=30.0),
        "joining/0.5/one": figures(ttft_p99_ms=20.0),
    }
    assert _ratios(found) == {"joining/0.5": 1.5}


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


def test_an_engine_that_takes_none_is_named(toy: Path) -> None:
    with pytest.raises(HearthError, match="no daemon"):
        add_adapters(toy / "hearth.sock", load_config(toy), 1)
