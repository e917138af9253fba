from __future__ import annotations

import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.admission import PolicySettings
from actors.messages import BatchEnded, BatchStarted, Cancel, Continuation, RunBatch
from actors.scheduler_policy import SchedulerPolicy
from tests.actors.simulation import LIMITS, Simulation, submit

SETTINGS = PolicySettings()


ONE_ROW = msgspec.structs.replace(LIMITS, max_batch=1)


def test_a_lone_request_waits_the_fill_time_and_no_longer() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(1.0, submit(1))
    simulation.run()
    outcome = simulation.outcomes[1]
    assert outcome.accepted == [1.0]
    assert outcome.started == pytest.approx(1.005)
    assert outcome.ends == ["done"]
    assert len(outcome.tokens) == 16


def test_nobody_waits_for_company_that_never_comes_until_it_does() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(300):
        simulation.arrive(1.0 + rid, submit(rid))
    simulation.run()
    assert simulation.outcomes[0].started == pytest.approx(1.005)
    assert simulation.outcomes[299].started == pytest.approx(300.0)
    for pair in range(10):
        for rid in (2 * pair, 2 * pair + 1):
            simulation.arrive(400.0 + pair + 0.001 * rid, submit(1000 + rid))
    simulation.run()
    assert simulation.batches[300] == [1000]
    assert simulation.batches[-1] == [1018, 1019]


def test_a_full_batch_starts_at_once() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(8):
        simulation.arrive(1.0 + rid * 0.0001, submit(rid))
    simulation.run()
    assert simulation.batches == [list(range(8))]
    assert simulation.outcomes[0].started == pytest.approx(1.0007)


def test_clients_in_a_loop_fill_batches() -> None:
    """Eight clients that ask again as soon as they have their answer share each batch."""
    simulation = Simulation(SETTINGS, step_s=0.002)
    for client in range(8):
        simulation.arrive(0.01 + client * 0.0003, submit(client))
    for turn in range(1, 20):
        simulation.run()
        for client in range(8):
            simulation.arrive(simulation.now + client * 0.0004, submit(turn * 8 + client))
    simulation.run()
    assert statistics.mean(len(batch) for batch in simulation.batches) > 6
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())


def test_a_free_executor_lets_the_next_batch_fill_although_one_has_waited() -> None:
    simulation = Simulation(SETTINGS, step_s=0.002)
    simulation.arrive(0.0, submit(1, tokens=50))
    simulation.arrive(0.05, submit(2))
    simulation.run(until=0.1)
    simulation.arrive(0.1055 + 0.003, submit(3))  # as it ends at 0.105
    simulation.run()
    assert simulation.batches == [[1], [2, 3]]


def test_after_a_release_nobody_waits_again() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5, fill_wait_s=0.1))
    simulation.arrive(0.0, submit(1, tokens=100))
    simulation.arrive(0.2, submit(2))
    simulation.run()
    assert simulation.batches == [[1], [2, 1]]
    assert simulation.outcomes[2].wait < 0.5 + 0.1 - 0.2 + 0.03


def test_short_requests_behind_a_long_one_wait_at_most_the_cap() -> None:
    simulation = Simulation(SETTINGS, step_s=0.01)
    simulation.arrive(0.0, submit(0, tokens=2000))
    for rid in range(1, 60):
        simulation.arrive(rid * 0.35, submit(rid, tokens=16))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1, 60)]
    assert max(waits) <= SETTINGS.hold_s + 2 * 0.01 + SETTINGS.fill_wait_s
    assert len(simulation.outcomes[0].tokens) == 2000
    assert simulation.policy.report(0).requeued >= 5


def test_with_one_row_at_a_time_the_long_request_goes_behind_and_still_ends() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5), limits=ONE_ROW)
    simulation.arrive(0.0, submit(0, tokens=500))
    for rid in range(1, 40):  # more than the executor can do beside: the queue is never empty
        simulation.arrive(rid * 0.16, submit(rid, tokens=16))
    simulation.run()
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())
    assert simulation.outcomes[1].wait < 0.6
    assert simulation.policy.report(0).requeued >= 3


def test_a_full_batch_whose_rows_have_ended_is_released_like_any_other() -> None:
    limits = msgspec.structs.replace(LIMITS, max_batch=2)
    simulation = Simulation(SETTINGS, limits=limits)
    for rid, tokens in ((1, 3000), (2, 20)):
        simulation.arrive(0.0, submit(rid, tokens=tokens, priority=10))
    simulation.arrive(0.1, submit(3))
    simulation.run()
    assert simulation.outcomes[3].wait < SETTINGS.hold_s + 0.1
    assert simulation.outcomes[1].ends == ["done"]


def test_two_long_requests_take_turns() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5), limits=ONE_ROW)
    simulation.arrive(0.0, submit(1, tokens=300))
    simulation.arrive(0.1, submit(2, tokens=300))
    simulation.run()
    ends = [simulation.outcomes[rid].ended or 0.0 for rid in (1, 2)]
    assert abs(ends[0] - ends[1]) <= 0.6
    assert simulation.batches[:4] == [[1], [2], [1], [2]]


def test_slow_prefill_does_not_eat_the_turns() -> None:
    """A continuation pays its prefill again, so a turn decodes for as long as it prefilled."""
    simulation = Simulation(
        PolicySettings(hold_s=0.5),
        limits=ONE_ROW,
        prefill_s_per_token=0.001,
    )
    for rid in (1, 2):
        simulation.arrive(0.0, submit(rid, prompt=1000, tokens=400))
    simulation.run()
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())
    assert simulation.now < 25


def test_a_batch_alone_is_never_interrupted() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=2000))
    simulation.run()
    assert simulation.batches == [[1]]


def test_a_high_priority_request_waits_one_batch_at_most() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(200):
        simulation.arrive(rid * 0.001, submit(rid, tokens=64, priority=0))
    for urgent in range(1000, 1010):
        simulation.arrive((urgent - 999) * 0.7, submit(urgent, priority=5))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1000, 1010)]
    assert max(waits) <= 64 * 0.01 + SETTINGS.fill_wait_s + 0.02


def test_low_priority_still_moves_under_a_flood() -> None:
    settings_ = PolicySettings(ageing_s=1.0, queue_requests=4096, hold_s=1.0)
    simulation = Simulation(settings_)
    simulation.arrive(0.0, submit(0, tokens=16, priority=-2))
    for rid in range(1, 2000):  # twice of what the executor can do
        simulation.arrive(rid * 0.01, submit(rid, tokens=16, priority=2))
    simulation.run(until=30)
    # Four levels below: after four seconds it stands before all that come later.
    assert simulation.outcomes[0].tokens
    assert simulation.outcomes[0].wait < 10


def test_a_full_batch_of_higher_priority_is_not_released_in_vain() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5), limits=ONE_ROW)
    simulation.arrive(0.0, submit(1, tokens=300, priority=5))
    simulation.arrive(0.1, submit(2, tokens=300, priority=0))
    simulation.run()
    assert simulation.batches == [[1], [2]]


def test_deadlines_end_waiting_and_running_requests() -> None:
    simulation = Simulation(SETTINGS, limits=ONE_ROW)
    simulation.arrive(0.0, submit(1, tokens=1000, deadline=1.0))
    simulation.arrive(0.1, submit(2, deadline=0.5))
    simulation.arrive(0.2, submit(3, deadline=0.1))
    simulation.arrive(0.3, submit(4, deadline=9.0))
    simulation.run()
    ends = {rid: (outcome.ends, outcome.ended) for rid, outcome in simulation.outcomes.items()}
    assert ends[1] == (["deadline_exceeded"], 1.0)
    assert ends[2] == (["deadline_exceeded"], 0.5)
    assert ends[3] == (["deadline_exceeded"], 0.2)
    assert ends[4][0] == ["done"]
    assert len(simulation.outcomes[1].tokens) < 110


@pytest.mark.parametrize(
    ("prompt", "tokens", "end"),
    [
        (4000, 16, "done"),
        (4001, 16, "prompt_too_long"),
        (10, 7990, "done"),
        (10, 7991, "capacity_exceeded"),
        (0, 1, "prompt_empty"),
    ],
)
@pytest.mark.parametrize("ready_at", [0.0, 5.0])
def test_exact_limits_work_and_one_more_is_refused(
    prompt: int, tokens: int, end: str, ready_at: float
) -> None:
    simulation = Simulation(SETTINGS, ready_at=ready_at)
    simulation.arrive(1.0, submit(1, prompt=prompt, tokens=tokens))
    simulation.run()
    assert simulation.outcomes[1].ends == [end]
    assert simulation.outcomes[1].accepted == ([max(1.0, ready_at)] if end == "done" else [])
    assert simulation.policy.report(0).refused == (end != "done")


def test_a_continuation_carries_all_its_tokens() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_s=0.0))
    policy.executor_ready(LIMITS, 0.0)
    policy.submit(submit(7, prompt=3, tokens=9), 0.0)
    started, run = policy.tick(0.0)
    assert isinstance(started, BatchStarted)
    assert isinstance(run, RunBatch)
    policy.batch_ended(BatchEnded(run.batch, [Continuation(7, [5, 6])]), 1.0)
    (again,) = policy.tick(1.0)
    assert isinstance(again, RunBatch)
    row = again.rows[7]
    assert (row.token_ids, row.prompt_length) == ([1, 1, 1, 5, 6], 3)
    assert row.options.max_tokens == 9


def test_mail_of_an_earlier_batch_is_ignored() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_s=0.0))
    policy.executor_ready(LIMITS, 0.0)
    policy.submit(submit(1), 0.0)
    policy.tick(0.0)
    policy.batch_ended(BatchEnded(99, [Continuation(1, [2])]), 0.1)
    assert policy.report(0).running == 1
    policy.cancel(1)
    policy.batch_ended(BatchEnded(1, [Continuation(1, [2])]), 0.1)
    assert (policy.report(0).running, policy.report(0).queued) == (0, 0)


def test_cancel_reaches_the_executor_only_when_the_row_runs() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_s=0.0))
    policy.executor_ready(ONE_ROW, 0.0)
    policy.submit(submit(1), 0.0)
    policy.submit(submit(2), 0.0)
    policy.tick(0.0)
    assert policy.cancel(2) == []
    assert policy.cancel(1) == [Cancel(1)]
    assert policy.cancel(1) == []
    assert policy.cancel(12345) == []


def test_a_lost_executor_fails_what_ran_and_keeps_what_waits() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(12):
        simulation.arrive(0.0, submit(rid, tokens=100))
    simulation.lose(0.5, ready_again=3.0)
    simulation.run()
    ends = [simulation.outcomes[rid].ends for rid in range(12)]
    assert ends == [["executor_failed"]] * 8 + [["done"]] * 4
    assert simulation.outcomes[0].ended == 0.5
    assert (simulation.outcomes[8].started or 0) >= 3.0


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 5),  # arrival
        st.integers(0, 60),  # prompt
        st.integers(1, 80),  # tokens
        st.integers(-10, 10),  # priority
        st.none() | st.floats(0, 4),  # deadline after arrival
        st.none() | st.floats(0, 4),  # cancelled after arrival
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    rows=st.integers(1, 4),
    hold_s=st.floats(0.01, 1),
    queue_requests=st.integers(1, 20),
    queue_tokens=st.integers(20, 300),
    losses=st.lists(st.floats(0, 6), max_size=2),
)
def test_nothing_is_lost_or_doubled(
    *,
    requests: list[tuple[float, int, int, int, float | None, float | None]],
    rows: int,
    hold_s: float,
    queue_requests: int,
    queue_tokens: int,
    losses: list[float],
) -> None:
    """Every request ends exactly once, with exactly its tokens; the simulation checks limits."""
    simulation = Simulation(
        PolicySettings(
            hold_s=hold_s, queue_requests=queue_requests, queue_tokens=queue_tokens, ageing_s=0.5
        ),
        limits=msgspec.structs.replace(
            LIMITS, max_batch=rows, max_prompt_tokens=50, max_total_tokens=100
        ),
        prefill_s_per_token=0.0005,
    )
    for rid, (arrival, prompt, tokens, priority, deadline, cancelled) in enumerate(requests):
        due = None if deadline is None else arrival + deadline
        simulation.arrive(
            arrival, submit(rid, prompt=prompt, tokens=tokens, priority=priority, deadline=due)
        )
        if cancelled is not None:
            simulation.cancel(arrival + cancelled, rid)
    for lost in losses:
        simulation.lose(lost, lost + 0.3)
    simulation.run()
    for rid, (_, prompt, tokens, *_rest) in enumerate(requests):
        outcome = simulation.outcomes[rid]
        assert len(outcome.ends) == 1
        assert len(outcome.accepted) <= 1
        if outcome.ends == ["done"]:
            assert len(outcome.tokens) == tokens
            assert outcome.accepted
        if prompt > 50:
            assert outcome.ends[0] in ("prompt_too_long", "cancelled")
    load = simulation.policy.report(0)
    assert (load.running, load.queued, load.queued_tokens) == (0, 0, 0)
