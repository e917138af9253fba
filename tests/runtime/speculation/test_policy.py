"""Rounds: which are tried, what is counted, and the closed formula of what they accept."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.request import RowRound
from hearth.runtime.speculation import policy as policy_module
from hearth.runtime.speculation.policy import EagleGenerationMetrics, SpeculationPolicy
from tests.runtime.generation.test_speculative import CONFIG, NODES, drain, make, row

STEP_S = 0.010
NOISE = 0.2
Speeds = Callable[[int], float]


class Outcome:
    """What a simulated run cost: seconds by way, and those that vanilla alone had needed."""

    def __init__(self) -> None:
        self.speculating = 0.0
        self.vanilla = 0.0
        self.baseline = 0.0
        self.lost = 0.0
        self.ways: list[bool] = []

    @property
    def seconds(self) -> float:
        return self.speculating + self.vanilla

    @property
    def cost(self) -> float:
        """Time against vanilla alone: 1.03 is 3% more."""
        return self.seconds / self.baseline


def run(
    steps: int,
    batch: int,
    speed: Speeds,
    *,
    noise: float = NOISE,
    seed: int = 0,
    policy: SpeculationPolicy | None = None,
    slow: Speeds = lambda _: 1.0,
) -> Outcome:
    """Rounds give 1 to 4 tokens a row, 2.5 in the mean, so that they have `speed` times vanilla's.

    Times are normal with the standard deviation `noise`, and `slow` times as long; without noise
    each round gives the mean.
    """
    rng = random.Random(seed)
    policy = policy or SpeculationPolicy(batch)
    outcome = Outcome()
    for number in range(steps):
        jitter = max(0.2, rng.gauss(1.0, noise)) * slow(number)
        outcome.ways.append(policy.wants(batch))
        if outcome.ways[-1]:
            drawn = sum(rng.randint(1, 4) for _ in range(batch))
            tokens = drawn if noise else batch * 5 // 2
            seconds = 2.5 / speed(number) * STEP_S * jitter
            policy.record_round(batch, tokens, seconds)
            outcome.speculating += seconds
            worth = tokens / batch * STEP_S * slow(number)
            outcome.lost += seconds - worth
        else:
            seconds = worth = STEP_S * jitter
            policy.record_step(batch, seconds)
            outcome.vanilla += seconds
        outcome.baseline += worth
    return outcome


def constant(speed: float) -> Speeds:
    return lambda _: speed


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("speed", [0.05, 0.3, 0.6, 0.9, 0.95, 0.98, 1.0])
def test_losing_never_costs_three_percent(speed: float, batch: int) -> None:
    for seed in range(2):
        assert run(12_000, batch, constant(speed), seed=seed).cost < 1.03


@pytest.mark.parametrize("speed", [0.05, 0.3, 0.6, 0.9])
def test_trials_of_a_loser_cost_less_than_a_hundredth(speed: float) -> None:
    """Beyond the first, whose cost the run cannot have paid before it knew."""
    policy = SpeculationPolicy(4)
    run(2_000, 4, constant(speed), policy=policy)
    long = run(60_000, 4, constant(speed), seed=1, policy=policy)
    assert 0.0 < long.lost / long.seconds < 0.01


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("speed", [1.5, 2.0, 3.0])
def test_winning_stays_on_but_for_seldom_vanilla_steps(speed: float, batch: int) -> None:
    outcome = run(10_000, batch, constant(speed))
    assert 0.0 < outcome.vanilla / outcome.seconds < 0.1
    assert outcome.cost == pytest.approx(1 / speed, rel=0.05)


@pytest.mark.parametrize(("speed", "most"), [(0.5, 1.03), (0.9, 1.03), (1.0, 1.01), (2.0, 0.54)])
def test_bursts_of_other_work_do_not_deceive_it(speed: float, most: float) -> None:
    """Every 150 steps another program slows some 20 steps of either way down by 2.5."""

    def burst(number: int) -> float:
        return 2.5 if number % 150 < 20 + number // 150 % 20 else 1.0

    for seed in range(3):
        assert run(20_000, 8, constant(speed), seed=seed, noise=0.1, slow=burst).cost < most


@pytest.mark.parametrize("batch", [1, 8])
def test_a_small_gain_is_taken_at_least_in_part(batch: int) -> None:
    assert run(20_000, batch, constant(1.2)).cost < 0.92


def test_without_noise_a_loser_is_tried_less_and_less_often() -> None:
    ways = run(20_000, 2, constant(0.5), noise=0.0).ways
    begins = [n for n in range(1, len(ways)) if ways[n] and not ways[n - 1]]
    gaps = [late - early for early, late in itertools.pairwise(begins)]
    assert len(gaps) >= 4
    assert gaps[2] == pytest.approx(2 * gaps[1], rel=0.05)


@pytest.mark.parametrize("period", [3_000, 10_000])
def test_a_loser_that_becomes_a_winner_is_found_and_the_reverse_left(period: int) -> None:
    def speed(number: int) -> float:
        return 2.0 if number // period % 2 else 0.5

    for seed in range(3):
        outcome = run(8 * period, 1, speed, seed=seed)
        assert outcome.cost < 0.95
        for late in range(period - 200, 8 * period, 2 * period):
            assert sum(outcome.ways[late : late + 200]) < 100


def test_it_starts_on_and_the_first_rounds_of_a_size_do_not_count() -> None:
    policy = SpeculationPolicy(1)
    for _ in range(2):
        assert policy.wants(1)
        policy.record_round(1, 1, 60.0)
    while policy.wants(1):
        policy.record_round(1, 4, 0.02)
    for _ in range(2):
        policy.record_step(1, 60.0)
    while not policy.wants(1):
        policy.record_step(1, 0.01)
    for _ in range(200):
        policy.record_round(1, 4, 0.02)
    assert policy.wants(1)


def test_once_a_trial_wins_it_is_on_at_once() -> None:
    policy = SpeculationPolicy(1)
    run(2_000, 1, constant(0.5), noise=0.0, policy=policy)
    ways = run(5_000, 1, constant(3.0), noise=0.0, policy=policy).ways
    on = ways.index(True)
    assert sum(ways[on : on + 200]) == 200


@pytest.mark.parametrize(("speed", "expected"), [(0.5, False), (3.0, True)])
def test_a_size_never_measured_begins_as_its_neighbour_stands(speed: float, expected: bool) -> None:  # noqa: FBT001 - a parametrized case
    policy = SpeculationPolicy(8)
    run(500, 8, constant(speed), policy=policy)
    assert policy.wants(7) is expected
    assert policy.wants(8) is expected


def test_a_winner_s_neighbour_is_measured_at_once() -> None:
    policy = SpeculationPolicy(8)
    run(5_000, 1, constant(3.0), policy=policy)
    ways = run(300, 8, constant(0.5), policy=policy).ways
    assert sum(ways) < 20


def test_of_two_neighbours_the_larger_tells() -> None:
    policy = SpeculationPolicy(8)
    run(500, 2, constant(3.0), policy=policy)
    run(500, 6, constant(0.5), policy=policy)
    assert not policy.wants(4)
    assert policy.wants(3)


def test_what_a_request_demands_while_it_is_off_decides_nothing() -> None:
    policy = SpeculationPolicy(1)
    run(500, 1, constant(0.5), noise=0.0, policy=policy)
    for _ in range(1_000):
        assert not policy.wants(1)
        policy.record_round(1, 4, 0.001)


def test_rounds_in_which_rows_failed_say_nothing() -> None:
    policy = SpeculationPolicy(2)
    for _ in range(40):
        policy.record_round(2, 0, 0.01)
        policy.record_step(2, 0.01)
    assert policy.wants(2)
    run(2_000, 2, constant(3.0), policy=policy)
    assert policy.wants(2)


ANY_SECONDS = st.sampled_from([0.0, 1e-12, 0.01, 3600.0, 1e15]) | st.floats(0, 1e300)
ANY_RECORD = st.tuples(
    st.integers(1, 2), st.integers(0, 10**9), ANY_SECONDS, st.sampled_from([True, False, None])
)


@settings(deadline=None)
@given(st.lists(ANY_RECORD, max_size=120), st.sampled_from([0.3, 3.0]))
def test_after_any_records_it_finds_the_faster_way_again(
    records: list[tuple[int, int, float, bool | None]], speed: float
) -> None:
    policy = SpeculationPolicy(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "_LONGEST", 300)
        for batch, tokens, seconds, way in records:
            if policy.wants(batch) if way is None else way:
                policy.record_round(batch, tokens, seconds)
            else:
                policy.record_step(batch, seconds)
        ways = run(1_500, 2, constant(speed), noise=0.0, policy=policy).ways
    rounds = sum(ways[-600:])
    assert rounds > 500 if speed > 1 else rounds < 100


def test_two_policies_share_nothing() -> None:
    run(500, 1, constant(0.1), policy=SpeculationPolicy(1))
    assert SpeculationPolicy(1).wants(1)


def test_rounds_add_up_over_rows_and_steps() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record(
        [RowRound(0, 5, 3), RowRound(2, 4, 1)], draft_s=0.25, verify_s=0.5, commit_s=0.125
    )
    metrics.record([RowRound(0, 5, 2)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    assert (metrics.steps, metrics.rounds, metrics.drafted, metrics.accepted) == (2, 3, 14, 6)
    assert (metrics.draft_s, metrics.verify_s, metrics.commit_s) == (0.5, 1.0, 0.25)
    assert metrics.accept_length == 2.0


def test_positions_tell_how_far_rounds_came() -> None:
    metrics = EagleGenerationMetrics()
    rows = [RowRound(0, 9, 1), RowRound(1, 9, 4), RowRound(2, 9, 2), RowRound(3, 9, 1)]
    metrics.record(rows, draft_s=0.0, verify_s=0.0, commit_s=0.0)
    assert metrics.accepted_by_position == [4, 2, 1, 1]
    assert sum(metrics.accepted_by_position) == metrics.accepted
    assert metrics.accept_rates == pytest.approx([1.0, 0.5, 0.25, 0.25])


def test_a_step_without_speculating_rows_costs_time_and_gives_no_round() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record([], draft_s=0.0, verify_s=1.0, commit_s=0.0)
    assert (metrics.steps, metrics.rounds, metrics.verify_s) == (1, 0, 1.0)


def test_nothing_done_has_no_length() -> None:
    metrics = EagleGenerationMetrics()
    assert metrics.accept_length == 0.0
    assert metrics.accept_rates == []
    # What happened between two readings, if nothing did.
    assert EagleGenerationMetrics(accepted_by_position=[0, 0]).accept_rates == []


def test_two_metrics_share_nothing() -> None:
    first, second = EagleGenerationMetrics(), EagleGenerationMetrics()
    first.record([RowRound(0, 1, 2)], draft_s=0.0, verify_s=0.0, commit_s=0.0)
    assert second.accepted_by_position == []


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
