"""The commands against a real daemon, at sizes that a test can afford."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench.commands import bench


def run(*arguments: str) -> tuple[int | None, dict[str, Any]]:
    result = CliRunner().invoke(bench, [*arguments, "--json"], standalone_mode=False)
    assert result.exception is None
    figures = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(figures, dict)
    return result.return_value, figures


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_the_group_lists_its_commands() -> None:
    result = CliRunner().invoke(bench, ["--help"])
    for name in ("decode", "overhead", "load", "graphs", "memory", "spec", "soak"):
        assert f"\n  {name} " in result.output


def test_load_finds_nothing_wrong_with_the_real_daemon() -> None:
    sizes = ("--requests", "41", "--clients", "6", "--processes", "2", "--max-tokens", "16")
    code, figures = run("load", *sizes, "--step-ms", "0.2")
    assert code == 0
    assert figures["tokens"] == 41 * 16
    assert {name: figures[name] for name in ("requests", "lost", "doubled", "disordered")} == {
        "requests": 41,
        "lost": 0,
        "doubled": 0,
        "disordered": 0,
    }


def test_overhead_gives_its_three_figures() -> None:
    sizes = ("--requests", "3", "--rounds", "1", "--max-tokens", "12", "--step-ms", "1")
    _, figures = run("overhead", *sizes)
    assert min(figures["token_added_ms"], figures["first_token_added_ms"]) > 0
    assert min(figures["tokens_per_s_8"], figures["in_process_tokens_per_s_8"]) > 0
    assert figures["throughput_loss_8"] < 1


def test_a_real_engine_has_steps_of_its_own(toy: Path) -> None:
    words = ["soak", "--engine", str(toy), "--step-ms", "2"]
    with pytest.raises(click.UsageError, match="--step-ms is for the simulated engine"):
        CliRunner().invoke(bench, words, standalone_mode=False, catch_exceptions=False)


def test_soak_counts_and_judges() -> None:
    code, figures = run("soak", "--minutes", "0.05", "--step-ms", "0.2")
    assert figures["failed"] == 0
    assert figures["requests"] > figures["aborted"] > 0
    assert figures["rss_mb"] > 20
    assert figures["handles"] > 10
    assert code == (0 if figures["flat"] else 1)
