import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions
from hearth.runtime.sampling import RowSampler
from hearth.runtime.sampling.batch import log_normaliser, top_logprobs
from hearth.runtime.sampling.ranking import leading, ranked
from hearth.runtime.sampling.row_sampler import (
    ScoreAdjustment,
    TokenCounts,
    UniformSource,
    draw,
    invert,
    kept_tokens,
    philox4x32,
    tempered,
    uniforms,
)
from tests.runtime.sampling import reference

VOCAB = 40


def pick(sampler: RowSampler, logits: np.ndarray, position: int) -> int | None:
    return sampler.pick(logits, int(logits.argmax()), position)


def step_logits(position: int) -> np.ndarray:
    return np.random.default_rng(position).standard_normal(VOCAB).astype(np.float32)


def generate(sampler: RowSampler, first: int, count: int) -> list[int]:
    tokens = []
    for position in range(first, first + count):
        token = pick(sampler, step_logits(position), position)
        assert token is not None
        sampler.accept(token)
        tokens.append(token)
    return tokens


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 20),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.0, 0.5]),
)
def test_a_row_that_was_put_back_continues_exactly(
    seed: int, pause: int, temperature: float, repetition: float, frequency: float
) -> None:
    params = RequestOptions(
        temperature=temperature,
        seed=seed,
        top_p=0.95,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
    )
    prompt = [1, 2, 3]
    whole = generate(RowSampler(params, prompt, 3, VOCAB), 3, 20)
    resumed = RowSampler(params, prompt + whole[:pause], 3, VOCAB)
    assert generate(resumed, 3 + pause, 20 - pause) == whole[pause:]


def test_default_parameters_are_greedy_and_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[9, 4]] = 2
    assert pick(RowSampler(RequestOptions(), [], 0, VOCAB), logits, 0) == 4


def test_greedy_obeys_penalties_and_bias() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 8]] = [2.0, 1.5]
    penalised = RowSampler(RequestOptions(repetition_penalty=2.0), [3], 1, VOCAB)
    assert pick(penalised, logits, 1) == 8
    biased = RowSampler(RequestOptions(logit_bias=((30, 5.0),)), [3], 1, VOCAB)
    assert pick(biased, logits, 1) == 30


def test_bias_is_added_after_the_repetition_penalty() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 8]] = [4.0, 4.5]
    params = RequestOptions(repetition_penalty=2.0, logit_bias=((3, 3.0),))
    # 4 / 2 + 3 = 5 beats 4.5; the other order would give (4 + 3) / 2.
    assert pick(RowSampler(params, [3], 1, VOCAB), logits, 1) == 3


def test_seeds_differ_and_repeat() -> None:
    def text(seed: int) -> list[int]:
        params = RequestOptions(temperature=2.0, seed=seed)
        return generate(RowSampler(params, [], 0, VOCAB), 0, 30)

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_scores_that_leave_float32_are_not_finite() -> None:
    logits = np.full(VOCAB, 3e38, np.float32)
    sampler = RowSampler(RequestOptions(repetition_penalty=0.01), [5], 1, VOCAB)
    with np.errstate(over="ignore"):
        assert pick(sampler, logits, 1) is None


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(HearthError) as caught:
        RowSampler(RequestOptions(logit_bias=((VOCAB, 1.0),)), [], 0, VOCAB)
    assert caught.value.field == "logit_bias"


PENALISED_VOCAB = 30
ids = st.lists(st.integers(0, PENALISED_VOCAB - 1), max_size=60)


def adjustment(params: RequestOptions, token_ids: list[int], prompt: int) -> ScoreAdjustment:
    return ScoreAdjustment(params, token_ids, token_ids[prompt:], PENALISED_VOCAB)


penalties = st.builds(
    RequestOptions,
    repetition_penalty=st.floats(0.5, 2.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(
        st.integers(0, PENALISED_VOCAB - 1), st.floats(-100, 100), max_size=5
    ).map(lambda biases: tuple(biases.items())),
)


@settings(deadline=None)
@given(penalties, ids, st.integers(0, 60))
def test_scores_are_those_of_the_plain_implementation(
    params: RequestOptions, token_ids: list[int], prompt: int
) -> None:
    logits = np.linspace(-3, 3, PENALISED_VOCAB, dtype=np.float32)
    found = adjustment(params, token_ids, prompt).apply(logits)
    expected = reference.adjusted(logits.tolist(), params, token_ids, prompt)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_prompt_tokens_count_for_repetition_alone() -> None:
    logits = np.ones(PENALISED_VOCAB, np.float32)
    repeated = adjustment(RequestOptions(repetition_penalty=2.0), [3, 4], 1).apply(logits)
    assert (repeated[3], repeated[4], repeated[5]) == (0.5, 0.5, 1.0)
    present = adjustment(RequestOptions(presence_penalty=2.0), [3, 4, 4], 1).apply(logits)
    assert (present[3], present[4]) == (1.0, -1.0)
    frequent = adjustment(RequestOptions(frequency_penalty=2.0), [3, 4, 4], 1).apply(logits)
    assert (frequent[3], frequent[4]) == (1.0, -3.0)


def test_logits_stay_as_they_were() -> None:
    logits = np.ones(PENALISED_VOCAB, np.float32)
    adjustment(RequestOptions(logit_bias=((1, 5.0),)), [], 0).apply(logits)
    assert logits.tolist() == [1.0] * PENALISED_VOCAB


@pytest.mark.parametrize(
    ("params", "active"),
    [
        (RequestOptions(), False),
        (RequestOptions(temperature=2.0, top_k=3), False),
        (RequestOptions(repetition_penalty=1.1), True),
        (RequestOptions(presence_penalty=-0.1), True),
        (RequestOptions(frequency_penalty=0.1), True),
        (RequestOptions(logit_bias=((0, 0.0),)), True),
    ],
)
def test_active_says_whether_anything_changes(params: RequestOptions, *, active: bool) -> None:
    assert adjustment(params, [], 0).active is active


def test_ids_without_a_logit_are_left_out() -> None:
    rows = adjustment(RequestOptions(repetition_penalty=2.0), [PENALISED_VOCAB, 2, -1], 0)
    rows.accept(PENALISED_VOCAB + 7)
    changed = rows.apply(np.ones(PENALISED_VOCAB, np.float32))
    assert np.flatnonzero(changed != 1).tolist() == [2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=500))
def test_counts_are_those_of_the_list(token_ids: list[int]) -> None:
    counts = TokenCounts(token_ids)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {i: token_ids.count(i) for i in set(token_ids)}


# Spread like logits: up to 40 below the likeliest, so that every search path is taken.
scores_strategy = hnp.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.one_of(st.floats(-40, 0, width=32), st.floats(-5, -3.5, width=32), st.just(-1.0)),
).map(lambda scores: scores - scores.max())


def kept(scores: np.ndarray, **settings: float) -> list[int]:
    params = RequestOptions(temperature=1.0, **settings)  # type: ignore[arg-type] # field names
    found = kept_tokens(scores.astype(np.float32), params)
    return list(range(scores.size)) if found is None else found.tolist()


@settings(deadline=None)
@given(scores_strategy, st.integers(1, 250))
def test_top_k_keeps_the_head_of_the_ranking(scores: np.ndarray, top_k: int) -> None:
    expected = reference.ranked(scores.tolist())[:top_k]
    assert kept(scores, top_k=top_k) == sorted(expected)


def near(mass: float, wanted: float) -> bool:
    return math.isclose(mass, wanted, rel_tol=1e-5)


@settings(deadline=None)
@given(scores_strategy, st.floats(0.001, 0.999), st.integers(0, 250))
def test_top_p_keeps_the_shortest_head_that_reaches_p(
    scores: np.ndarray, top_p: float, top_k: int
) -> None:
    weights = [math.exp(score) for score in scores.tolist()]
    order = reference.ranked(scores.tolist())[: top_k or None]
    expected = reference.nucleus(order, weights, top_p)
    total = sum(weights[i] for i in order)
    mass = np.cumsum([weights[i] for i in order]) / total
    # Where a border lies within rounding of p, either side of it is right.
    assume(not any(near(float(part), top_p) for part in mass))
    assert kept(scores, top_p=top_p, top_k=top_k) == sorted(expected)


@settings(deadline=None)
@given(scores_strategy, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_likely_beside_the_likeliest(scores: np.ndarray, min_p: float) -> None:
    weights = [math.exp(score) for score in scores.tolist()]
    assume(not any(near(weight, min_p) and weight < 1 for weight in weights))
    expected = [i for i, weight in enumerate(weights) if weight >= min_p]
    assert kept(scores, min_p=min_p) == expected


@settings(deadline=None)
@given(scores_strategy, st.integers(0, 9), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_the_likeliest_token_always_passes(
    scores: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    assert int(scores.argmax()) in kept(scores, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize(("scale", "top_p"), [(3.0, 0.5), (1.0, 0.9), (0.01, 0.99)])
def test_top_p_over_a_large_vocabulary(scale: float, top_p: float) -> None:
    scores = np.random.default_rng(1).standard_normal(20_000).astype(np.float32) * scale
    scores -= scores.max()
    weights = np.exp(scores.astype(np.float64))
    order = np.array(reference.ranked(scores.tolist()))
    mass = np.cumsum(weights[order]) / weights.sum()
    found = kept(scores, top_p=top_p)
    assert found == sorted(order[: len(found)].tolist())
    assert mass[len(found) - 2] < top_p + 1e-6
    assert mass[len(found) - 1] > top_p - 1e-6


def test_filters_that_are_off_keep_everything() -> None:
    scores = np.zeros(5, np.float32)
    assert kept_tokens(scores, RequestOptions(temperature=1.0)) is None
    assert kept_tokens(scores, RequestOptions(temperature=1.0, top_k=5)) is None


def test_min_p_is_measured_after_top_k() -> None:
    scores = np.log(np.array([0.1, 0.5, 0.3, 0.1], np.float32) / 0.5)
    assert kept(scores, top_k=2, min_p=0.7) == [1]
    assert kept(scores, top_k=3, min_p=0.5) == [1, 2]


def test_top_p_is_measured_on_what_top_k_kept() -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32) / 0.4)
    assert kept(scores, top_p=0.6) == [0, 1]
    # Of the two that top-k leaves, the first alone holds 4/7, which is less than 0.6.
    assert kept(scores, top_k=2, top_p=0.57) == [0]


weights_strategy = hnp.arrays(
    np.float32,
    st.sampled_from([1, 2, 5, 40, 1023, 1024, 1025, 3000]),
    elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    fill=st.just(0.0),
).filter(lambda weights: weights.any())


@settings(deadline=None)
@given(weights_strategy, st.floats(0, 1, exclude_max=True))
def test_invert_is_the_first_index_above_the_target(weights: np.ndarray, uniform: float) -> None:
    target = uniform * float(weights.sum())
    expected = next(i for i, mass in enumerate(np.cumsum(weights).tolist()) if mass > target)
    # These weights add up exactly, so that any order of summation agrees.
    assert invert(weights, uniform) == expected


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 2500), elements=st.floats(0, 1, width=32)).filter(
        lambda weights: weights.any()
    )
)
def test_the_largest_uniform_number_still_hits_a_token_with_weight(weights: np.ndarray) -> None:
    assert weights[invert(weights, math.nextafter(1.0, 0.0))] > 0
    assert weights[invert(weights, 0.0)] > 0


def test_tempered_scores_end_at_zero() -> None:
    scores = np.array([1, 3, -5], np.float32)
    assert tempered(scores, 3.0, 0.5).tolist() == [-4.0, 0.0, -16.0]


def test_a_tiny_temperature_leaves_only_the_highest_score() -> None:
    scores = np.array([1, 3, 3, -5], np.float32)
    with np.errstate(over="ignore"):
        relative = tempered(scores, 3.0, 1e-300)
    params = RequestOptions(temperature=1e-300)
    assert {draw(relative, params, u) for u in (0.0, 0.3, 0.7, 0.99)} == {1, 2}


@pytest.mark.parametrize(
    "params",
    [
        RequestOptions(temperature=1.0),
        RequestOptions(temperature=0.6, top_k=7),
        RequestOptions(temperature=1.3, top_p=0.85),
        RequestOptions(temperature=1.0, min_p=0.1),
        RequestOptions(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_filtered_distribution(params: RequestOptions) -> None:
    logits = np.random.default_rng(5).standard_normal(40).astype(np.float32) * 2
    expected = reference.distribution(logits.tolist(), params)
    relative = tempered(logits, float(logits.max()), params.temperature)
    count = 8000
    drawn = [draw(relative, params, u) for u in uniforms(11, 0, count).tolist()]
    assert set(drawn) <= set(expected)
    groups = [(drawn.count(i), probability * count) for i, probability in expected.items()]
    rare = [group for group in groups if group[1] < 5]
    groups = [group for group in groups if group[1] >= 5]
    groups.append((sum(seen for seen, _ in rare), sum(wanted for _, wanted in rare) + 1e-9))
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups)
    # Mean plus five standard deviations of a chi-square variable.
    degrees = len(groups) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


# The known answers that the authors publish with their library (Random123, kat_vectors).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    found = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert found.tolist() == words


def test_counters_do_not_affect_one_another() -> None:
    key = np.array([3, 4], np.uint64)
    counters = np.arange(12, dtype=np.uint64).reshape(3, 4)
    together = philox4x32(counters, key)
    for counter, words in zip(counters, together, strict=True):
        assert philox4x32(counter, key).tolist() == words.tolist()


def test_a_uniform_is_the_high_bits_of_two_words() -> None:
    high, low = KNOWN[0][2][:2]
    expected = ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    assert uniforms(0, 0, 1)[0] == expected


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 300), max_size=8))
def test_the_number_of_a_position_depends_on_nothing_asked_before(
    seed: int, base: int, steps: list[int]
) -> None:
    source = UniformSource(seed)
    for step in steps:
        assert source.at(base + step) == uniforms(seed, base + step, 1)[0]


def test_seeds_and_positions_give_different_numbers() -> None:
    seeds = [0, 1, 2**32, 2**63 - 1]
    numbers = {number for seed in seeds for number in uniforms(seed, 0, 1000).tolist()}
    assert len(numbers) == 4000
    assert all(0 <= number < 1 for number in numbers)


def test_numbers_are_uniform() -> None:
    numbers = np.concatenate([uniforms(seed, 0, 1000) for seed in range(64)])
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = numbers.size / 64
    # 99.9% point of chi-square with 63 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 103.4


floats = st.floats(-(2.0**100), 2.0**100, width=32)
# Few distinct values, so that ties are common.
tied = st.sampled_from([-np.inf, -2.5, -1.0, -0.0, 0.0, 1.0, 1.0000001, 3.0])
mixed_scores = hnp.arrays(np.float32, st.integers(1, 60), elements=st.one_of(floats, tied))


@settings(deadline=None)
@given(mixed_scores)
def test_ranked_orders_by_score_then_id(scores: np.ndarray) -> None:
    found = ranked(scores, np.arange(scores.size))
    assert found.tolist() == reference.ranked(scores.tolist())


@settings(deadline=None)
@given(mixed_scores, st.integers(1, 80))
def test_leading_is_the_head_of_the_ranking(scores: np.ndarray, count: int) -> None:
    assert leading(scores, count).tolist() == reference.ranked(scores.tolist())[:count]


def test_ids_are_those_given() -> None:
    scores = np.array([1, 2, 1], np.float32)
    assert ranked(scores, np.array([7, 3, 5])).tolist() == [3, 5, 7]


def test_zeros_of_both_signs_are_equal() -> None:
    assert ranked(np.array([-0.0, 0.0, -0.0], np.float32), np.arange(3)).tolist() == [0, 1, 2]


def test_inputs_stay_as_they_were() -> None:
    scores = np.array([3, -1, 2], np.float32)
    leading(scores, 2)
    assert scores.tolist() == [3, -1, 2]


def logits(size: int = 300) -> np.ndarray:
    return np.random.default_rng(2).standard_normal(size).astype(np.float32) * 4


def test_probabilities_add_up_to_one() -> None:
    row = logits()
    normaliser = log_normaliser(row, row.max())
    assert np.exp(row.astype(np.float64) - normaliser).sum() == pytest.approx(1, abs=1e-6)


def test_large_logits_do_not_overflow() -> None:
    row = np.array([1000, 1000], np.float32)
    assert log_normaliser(row, row.max()) == pytest.approx(1000 + np.log(2))


def test_the_likeliest_tokens_come_first_and_ties_by_id() -> None:
    row = logits()
    row[[200, 7]] = row.max() + 1
    top = top_logprobs(row, 0.0, 5)
    assert [entry.token_id for entry in top] == reference.ranked(row.tolist())[:5]
    assert [entry.token_id for entry in top[:2]] == [7, 200]
    assert top[0].logprob == pytest.approx(float(row[7]))


def test_none_wanted_is_none_given() -> None:
    assert top_logprobs(logits(), 0.0, 0) == ()
