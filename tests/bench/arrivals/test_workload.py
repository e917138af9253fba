from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

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
from hearth.bench.arrivals.run import _ratios
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.lora.peft import read_peft
from hearth.runtime.text import Tokenizer
from tests.bench.arrivals.test_run import figures
from tests.bench.conftest import REFERENCE
from tests.bench.running import run


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
