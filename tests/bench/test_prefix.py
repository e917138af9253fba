import json
from pathlib import Path
from typing import Any

import click
import pytest
from msgspec import structs

from hearth.bench import one_row, prefix
from hearth.bench.prefix import (
    Round,
    prefix_figures,
    room,
    runtime_options,
    shared_figures,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.memory.sizes import kv_cache_bytes
from hearth.runtime.onnx_runtime import installed_version, reads_native
from hearth.runtime.request import RowToken, TopLogprob
from tests.bench.running import invoke
from tests.runtime.engine_configs import small_config


def run(*flags: str) -> tuple[int, dict[str, Any], str]:
    result = invoke("prefix", *flags)
    return result.return_value, json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_a_toy_is_measured_and_its_replies_are_those_without_the_cache(tmp_path: Path) -> None:
    flags = ("--quick", "--rounds", "1", "--threads", "1", "--cache", str(tmp_path), "--json")
    _, found, said = run(*flags, "--shared", "64", "--shared", "1024", "--shared", "8192")
    assert "what is longer is left out" in said
    assert list(found["shared"]) == ["64", "1024"]
    native = reads_native(installed_version())
    assert (found["equal"], found["exact"]) == (1.0, native)
    assert found["saved_share"] <= found["shared"]["1024"]["saved_share"]
    assert found["ttft_ratio_1024"] < 1
    assert found["shared"]["1024"]["reused"] == 1024
    # Keys and values of 2 layers, in float32: 2 heads of 32.
    assert found["bytes_per_token"] == 2 * 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--engine", "x", "--quick"), "for the model that this bench makes"),
        (("--engine", "x", "--kind", "int4"), "for the model that this bench makes"),
        (("--kind", "tensorrt"), "no kind on cpu"),
        (("--builder-python", "x"), "is for --kind tensorrt"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        run(*flags)
    assert words in caught.value.format_message()


def test_an_engine_of_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_row, "gpu_facts", lambda: None)
    monkeypatch.setattr(prefix, "load_config", lambda _folder: small_config())
    with pytest.raises(HearthError, match="for cpu, not cuda") as caught:
        run("--device", "cuda", "--engine", str(tmp_path))
    assert caught.value.field == "device"


def test_the_cache_holds_the_longest_prompt_twice() -> None:
    config = small_config()
    options = runtime_options(config, 64)
    assert options.prefix_cache_bytes == 2 * kv_cache_bytes(config, 1, room(64))
    assert (options.max_batch, options.capacity) == (1, config.max_kv_cache_capacity)


def reply(*tokens: int, logprob: float = -0.5) -> list[RowToken]:
    top = (TopLogprob(7, logprob), TopLogprob(8, logprob - 0.05))
    return [RowToken(0, token, logprob, top) for token in tokens]


ROUND = Round(1.1, 0.15, 1.0, 0.1, 64, reply(7, 9), reply(7, 9))


def test_what_is_saved_is_of_the_time_that_shared_tokens_take() -> None:
    found = shared_figures([ROUND, ROUND._replace(with_s=9.0), ROUND], None)
    assert found.saved_share == pytest.approx(1 - 0.05 / 0.9)
    assert [found.ttft_ratio, found.fill_cost] == pytest.approx([0.15, 1.1])
    assert (found.without_ms, found.with_ms, found.own_ms) == (1000, 150, 100)
    assert (found.reused, found.equal, found.largest_difference) == (64, 1.0, 0.0)


def test_the_lowest_share_counts_and_the_ratio_is_that_of_1024_tokens() -> None:
    short = shared_figures([ROUND], None)
    long = structs.replace(short, saved_share=0.5, ttft_ratio=0.25)
    found = prefix_figures({64: short, 1024: long}, 96.0, exact=True)
    assert (found.saved_share, found.ttft_ratio_1024, found.bytes_per_token) == (0.5, 0.25, 96.0)
    assert list(found.missed()) == ["less than 90% of the time of what is shared is saved"]
    found = prefix_figures({64: short}, 96.0, exact=True)
    assert found.ttft_ratio_1024 is None
    assert not list(found.missed())


@pytest.mark.parametrize(
    ("ours", "exact", "near"),
    [
        (reply(7, 9), True, True),
        (reply(7, 9, logprob=-0.4999), False, True),
        (reply(8, 9), False, True),
        (reply(6, 9), False, False),
        (reply(7), False, False),
    ],
)
def test_replies_are_equal_bit_for_bit_or_but_for_near_ties(
    ours: list[RowToken], *, exact: bool, near: bool
) -> None:
    given = ROUND._replace(reply=ours)
    assert shared_figures([given], None).equal == exact
    assert shared_figures([given], 0.1).equal == near


def test_log_probabilities_are_compared_up_to_the_first_other_token() -> None:
    given = ROUND._replace(reply=[*reply(7, logprob=-0.25), *reply(8, logprob=-3.0)])
    assert shared_figures([given], 0.1).largest_difference == 0.25
