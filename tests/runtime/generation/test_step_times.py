"""Steps on a device of `step_s` and a host that queues one in `host_s`; budgets of prefill."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.ewma import Ewma
from hearth.runtime.generation.prefill_budget import LEAST_TOKENS, Chunk, PrefillBudget, Prompt
from hearth.runtime.generation.step_times import QueueTime, StageMetrics, StepTimes
from hearth.runtime.request import RowToken
from tests.runtime.arrangements import new_row


def step_times(
    step_s: list[float], host_s: float, *, stalls: dict[int, float] | None = None
) -> list[float]:
    """Seconds from the end of each step to that of the next, where a place is always free."""
    queueing = QueueTime()
    collected, running_ends, found = 0.0, step_s[0], list[float]()
    for number, next_s in enumerate(step_s):
        queued = collected + queueing.behind(host_s) + host_s
        next_ends = max(running_ends, queued) + next_s
        looked = max(running_ends, queued) + (stalls or {}).get(number, 0.0)
        queueing.record(looked - collected)
        found.append(looked - collected)
        collected, running_ends = looked, next_ends
    return found


@pytest.mark.parametrize("host_s", [0.0001, 0.001, 0.003])
def test_a_steady_device_never_waits_for_long(host_s: float) -> None:
    assert max(step_times([0.004] * 500, host_s)[1:]) < 0.0041


@pytest.mark.parametrize("number", [32, 33, 40])
def test_a_stall_is_forgotten_at_once(number: int) -> None:
    found = step_times([0.004] * 200, 0.0001, stalls={number: 10.0})
    assert sum(one > 0.0041 for one in found) == 1


def test_steps_that_become_shorter_are_soon_waited_for_no_longer_than_they_take() -> None:
    found = step_times([0.012] * 100 + [0.004] * 100, 0.0001)
    assert sum(one > 0.0041 for one in found[100:]) < 20


def test_the_next_step_is_queued_shortly_before_the_end() -> None:
    queueing = QueueTime()
    assert queueing.behind(0.0001) == 0.0
    queueing.record(0.004)
    assert queueing.behind(0.0001) == pytest.approx(0.0035)
    assert queueing.behind(0.001) == pytest.approx(0.002)
    assert queueing.behind(0.003) == 0.0


def test_each_row_pays_for_the_prefill_of_its_own_time() -> None:
    times, rows = StepTimes(), [new_row(number)[1] for number in (5, 3, 9)]
    first, second, third = rows
    times.admitted([first])
    times.prefill.record(8, 0.5)
    assert first.paid_from == inf
    second.reused = third.reused = 32
    assert times.first_tokens(rows, [RowToken(5, 1)]) == ({5: first.placed}, {})
    times.generation.record(1, 0.25)
    times.admitted([second, third])
    times.prefill.record(8, 0.125)
    # What the others pay for meanwhile is no debt of the first.
    tokens = [RowToken(3, 1), RowToken(9, -1, error="non_finite")]
    assert times.first_tokens(rows, tokens) == ({3: second.placed, 9: third.placed}, {3: 32})
    assert (first.paid_from, second.paid_from) == (0.5, 0.375)
    assert first.placed <= second.placed == third.placed


CHUNK, CAPACITY = 256, 2048


def measured(share: float = 1.0, *, step_s: float = 0.010, token_s: float = 40e-6) -> PrefillBudget:
    decode_s = Ewma(0.1)
    decode_s.add(step_s)
    budget = PrefillBudget(CHUNK, CAPACITY, share, decode_s)
    for computed in (100, 40):
        budget.record(computed, step_s + computed * token_s)
    return budget


@pytest.mark.parametrize(("share", "tokens"), [(1.0, 250), (0.5, 125), (2.0, 500), (0.01, 16)])
def test_what_tokens_cost_is_a_share_of_a_decode_step(share: float, tokens: int) -> None:
    assert measured(share).tokens == pytest.approx(tokens, abs=1)


def test_before_anything_is_measured_a_chunk_is_as_exported() -> None:
    budget = PrefillBudget(CHUNK, CAPACITY, 1.0, Ewma(0.1))
    budget.record(100, 1.0)
    assert budget.tokens == CHUNK
    assert PrefillBudget(4, CAPACITY, 1.0, Ewma(0.1)).tokens == LEAST_TOKENS


def test_tokens_that_cost_nothing_have_no_limit() -> None:
    assert measured(token_s=0.0).choose([Prompt(0, 500)] * 8, limited=True) == Chunk(8, CHUNK)
    assert measured(token_s=-1e-6).choose([Prompt(0, 500)], limited=True) == Chunk(1, CHUNK)


def test_a_slow_engine_gets_a_few_tokens() -> None:
    budget = measured(token_s=1.0)
    assert budget.choose([Prompt(0, 500)], limited=True) == Chunk(1, LEAST_TOKENS)


def test_a_chunk_of_one_token_hardly_tells() -> None:
    budget = measured()
    budget.record(1, 0.012)
    assert budget.tokens > 100


def test_speeds_are_those_of_late() -> None:
    decode_s = Ewma(0.1, 0.010)
    budget = PrefillBudget(CHUNK, CAPACITY, 1.0, decode_s)
    for _ in range(60):
        budget.record(100, 0.010 + 100 * 80e-6)
    assert budget.tokens == pytest.approx(125, abs=2)
    for _ in range(60):
        decode_s.add(0.020)
    assert budget.tokens > 230


def test_nobody_waits_where_nobody_decodes() -> None:
    budget = measured(token_s=1.0)
    assert budget.choose([Prompt(0, 9), Prompt(0, 500)], limited=False) == Chunk(2, CHUNK)


@pytest.mark.parametrize(
    ("left", "chunk"),
    [
        ([100], Chunk(1, 100)),
        ([300], Chunk(1, 250)),
        ([100, 120], Chunk(2, 120)),
        # A partner would take of the first one's tokens.
        ([150, 160], Chunk(1, 150)),
        # The second one gets what is left, padding counted.
        ([40, 500], Chunk(2, 125)),
        ([40, 60, 62, 500], Chunk(4, 62)),
    ],
)
def test_joiners_share_while_tokens_and_padding_stay_within(left: list[int], chunk: Chunk) -> None:
    budget = measured(token_s=39.9e-6)
    assert budget.choose([Prompt(0, one) for one in left], limited=True) == chunk


def test_no_joiner_shares_a_width_that_it_has_no_slots_for() -> None:
    full = Prompt(CAPACITY - 5, 4)
    assert measured().choose([full, Prompt(0, 6)], limited=False) == Chunk(1, 4)
    assert measured().choose([full, Prompt(0, 5)], limited=False) == Chunk(2, 5)


PROMPTS = st.lists(
    st.integers(1, CAPACITY - 1).flatmap(
        lambda left: st.builds(Prompt, st.integers(0, CAPACITY - 1 - left), st.just(left))
    ),
    min_size=1,
    max_size=8,
).map(lambda found: sorted(found, key=lambda one: one.left))


@given(PROMPTS, st.booleans(), st.floats(0, 0.1), st.floats(0.01, 4))
def test_a_chunk_stays_within_its_limits(
    prompts: list[Prompt],
    limited: bool,  # noqa: FBT001 - drawn
    token_s: float,
    share: float,
) -> None:
    budget = measured(share, token_s=token_s)
    chunk = budget.choose(prompts, limited=limited)
    assert 1 <= chunk.rows <= len(prompts)
    assert 1 <= chunk.width <= min(CHUNK, prompts[chunk.rows - 1].left)
    assert all(one.filled + chunk.width <= CAPACITY for one in prompts[: chunk.rows])
    if limited:
        assert chunk.rows * chunk.width <= budget.tokens
    alone = budget.choose(prompts[:1], limited=limited)
    assert chunk.width >= alone.width or not limited


@pytest.mark.parametrize(
    ("token_us", "width"), [(40, 128), (100, 100), (160, 32), (10_000, 32), (0, 256)]
)
def test_a_piece_fills_a_width_to_which_it_would_be_padded(token_us: float, width: int) -> None:
    widths = (32, 100, 128, 256)
    budget = PrefillBudget(CHUNK, CAPACITY, 1.0, Ewma(0.1, 0.0101), widths=widths)
    budget.record(100, 0.0101 + 100 * token_us * 1e-6)
    assert budget.choose([Prompt(0, 500)], limited=True) == Chunk(1, width)
    assert budget.choose([Prompt(0, 20)], limited=True) == Chunk(1, 20)
    assert budget.choose([Prompt(0, 500)], limited=False) == Chunk(1, CHUNK)


def test_steps_add_up() -> None:
    metrics = StageMetrics()
    metrics.record(8, 0.5)
    metrics.record(2, 1.5)
    assert (metrics.steps, metrics.tokens, metrics.seconds) == (2, 10, 2.0)
