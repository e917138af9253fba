from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")

from models.train import (  # noqa: E402 - needs torch
    WARMUP,
    Defaults,
    Settings,
    optimizer_of,
    rate_at,
    scheduled,
    settings_of,
    training_flags,
)

SETTINGS = Settings(Path(), "cpu", 3, 60.0, 2500, 1e-3, 0, 0)
DEFAULTS = Defaults(Path("out"), 65536, 6144, 3e-3, seed=7)
HOME = Path(__file__).parents[2] / "models" / "home"


def given(*words: str) -> Settings:
    return settings_of(training_flags(None, DEFAULTS).parse_args(words), DEFAULTS)


def test_the_rate_rises_and_falls_to_zero() -> None:
    assert rate_at(WARMUP, SETTINGS) == pytest.approx(1e-3)
    assert rate_at(WARMUP / 2, SETTINGS) == pytest.approx(5e-4)
    assert rate_at(1.0, SETTINGS) == pytest.approx(0.0)


def test_matrices_decay_and_vectors_do_not() -> None:
    groups = optimizer_of(torch.nn.Linear(3, 2), 1e-3, 0.1).param_groups
    found = [(one["weight_decay"], [tuple(p.shape) for p in one["params"]]) for one in groups]
    assert found == [(0.1, [(2, 3)]), (0.0, [(2,)])]


def test_batches_come_with_their_rate_until_the_last_step() -> None:
    tokenizer = Tokenizer.from_file(str(HOME / "tokenizer.json"))
    optimizer = optimizer_of(torch.nn.Linear(3, 2), 1.0, 0.0)
    seen, rates = 0, []
    for step, taken in enumerate(scheduled(SETTINGS, tokenizer, optimizer)):
        seen += taken.batch[0].numel()
        assert (taken.step, taken.tokens) == (step, seen)
        rates.append(optimizer.param_groups[1]["lr"])
    # The step's share of the run, unless its time is the larger one.
    assert rates[1:] == [pytest.approx(rate_at(n / 3, SETTINGS), rel=0.2) for n in (1, 2)]
    assert len(rates) == 3


def test_a_run_ends_when_its_time_is_over() -> None:
    tokenizer = Tokenizer.from_file(str(HOME / "tokenizer.json"))
    optimizer = optimizer_of(torch.nn.Linear(3, 2), 1.0, 0.0)
    assert list(scheduled(replace(SETTINGS, seconds=1e-6), tokenizer, optimizer)) == []


@pytest.mark.parametrize(
    ("device", "steps", "tokens"), [("cuda", 30000, 65536), ("cpu", 2500, 6144)]
)
def test_what_is_not_given_follows_the_device(device: str, steps: int, tokens: int) -> None:
    found = given("--device", device)
    assert (found.steps, found.tokens, found.seconds) == (steps, tokens, 3600)
    assert (found.out, found.rate, found.seed) == (Path("out"), 3e-3, 7)
    assert found.workers >= 1


def test_what_is_given_is_taken() -> None:
    words = ("--steps", "5", "--tokens", "9", "--minutes", "0.5", "--workers", "0", "--seed", "0")
    found = given(*words, "--rate", "0.1", "--out", "x", "--device", "cpu")
    assert found == Settings(Path("x"), "cpu", 5, 30.0, 9, 0.1, 0, 0)


@pytest.mark.parametrize("flag", ["--steps", "--tokens", "--minutes"])
def test_nothing_at_all_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given(flag, "0")
    assert f"argument {flag}" in capsys.readouterr().err
