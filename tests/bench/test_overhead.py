from contextlib import closing
from pathlib import Path

import pytest

from hearth.bench import overhead
from hearth.bench.overhead import Arrivals, InProcessLoop, overhead_figures
from tests.bench.running import run


def test_figures_are_differences_of_medians() -> None:
    quick = Arrivals(
        tokens=[0.0004, 0.0005, 0.0009], first=[0.0006, 0.0007], ttft=[0.0071, 0.0072, 0.1]
    )
    default = Arrivals(tokens=[0.001], first=[0.001], ttft=[0.0122])
    found = overhead_figures(quick, default, [0.006, 0.0062, 0.007], (1552.0, 1600.0))
    assert found.ttft_added_ms == pytest.approx(1.0)
    assert found.token_added_ms == pytest.approx(0.5)
    assert found.first_token_added_ms == pytest.approx(0.65)
    assert found.ttft_added_default_ms == pytest.approx(6.0)
    assert found.throughput_loss_8 == pytest.approx(0.03)
    assert found.token_added_p99_ms > 0.8


def test_the_in_process_loop_takes_at_least_the_time_of_its_steps(toy: Path) -> None:
    with closing(InProcessLoop(toy, step_ms=2.0)) as loop:
        assert loop.first_token_s("switch the light on") >= 0.002
        assert 0 < loop.tokens_per_s(["a", "b b", "c"], max_tokens=20) <= 1500


def test_the_in_process_loop_counts_every_token(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(InProcessLoop(toy, step_ms=0.0)) as loop:
        times = iter([100.0, 104.0])
        monkeypatch.setattr(overhead, "monotonic", times.__next__)
        assert loop.tokens_per_s(["a", "b b", "c"], max_tokens=20) == 60 / 4


def test_the_command_gives_its_figures() -> None:
    sizes = ("--requests", "3", "--rounds", "1", "--max-tokens", "12", "--step-ms", "1")
    _, figures = run("overhead", *sizes)
    assert min(figures["token_added_ms"], figures["first_token_added_ms"]) > 0
    assert min(figures["tokens_per_s_8"], figures["in_process_tokens_per_s_8"]) > 0
    assert figures["throughput_loss_8"] < 1
