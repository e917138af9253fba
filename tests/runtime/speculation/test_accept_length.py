"""The accounting of rounds against the closed formula, with a draft of a set hit rate."""

import random

import pytest
from msgspec import structs

from tests.runtime.generation.test_speculative import CONFIG, NODES, drain, make, row

ROWS, TOKENS = 4, 1_500


def expected_length(rate: float) -> float:
    """Tokens a round of a chain whose tokens are each right with `rate`: the sum of its powers.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", equation 1.
    """
    return sum(rate**place for place in range(NODES))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_accept_length_is_that_of_the_formula(rate: float) -> None:
    rng = random.Random(7)

    def hits(_position: int) -> int:
        return next((n for n in range(NODES - 1) if rng.random() >= rate), NODES - 1)

    runtime, _ = make(hits, structs.replace(CONFIG, max_kv_cache_capacity=2_048))
    runtime.admit([row([3 + number], TOKENS) for number in range(ROWS)])
    tokens, steps = drain(runtime)
    metrics = runtime.speculation_metrics
    assert metrics.accept_length == pytest.approx(expected_length(rate), rel=0.03)
    for place, share in enumerate(metrics.accept_rates):
        assert share == pytest.approx(rate**place, abs=0.03)
    # The first token of a row comes with its prompt, all others from rounds.
    assert metrics.accepted == sum(map(len, tokens.values())) - ROWS == ROWS * (TOKENS - 1)
    assert metrics.steps == len(steps) - 1
