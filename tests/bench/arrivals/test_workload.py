from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from bench.arrivals.workload import MEAN_REPLY, PROMPT_TOKENS, REPLY_TOKENS, Workload
from runtime.text import Tokenizer


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
