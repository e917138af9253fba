from __future__ import annotations

import statistics

import msgspec
import pytest

from hearth.actors.messages import Failed
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from tests.actors.simulation import (
    LIMITS,
    SEEN,
    Simulation,
    new_rows,
    output,
    ready,
    schedule_of,
    submit,
)

JOINING = PolicySettings()
SYNCHRONOUS = PolicySettings(batching="synchronous")
ONE_ROW = msgspec.structs.replace(LIMITS, max_batch=1)
BOTH = pytest.mark.parametrize("settings", [JOINING, SYNCHRONOUS], ids=lambda one: one.batching)


@BOTH
def test_a_lone_request_waits_the_fill_time_and_no_longer(settings: PolicySettings) -> None:
    simulation = Simulation(settings)
    simulation.arrive(1.0, submit(1))
    simulation.run()
    outcome = simulation.outcomes[1]
    assert outcome.accepted == [1.0]
    assert outcome.placed == [pytest.approx(1.005)]
    assert outcome.ends == ["done"]
    assert len(outcome.tokens) == 16


@BOTH
def test_nobody_waits_for_company_that_never_comes_until_it_does(settings: PolicySettings) -> None:
    simulation = Simulation(settings)
    for rid in range(300):
        simulation.arrive(1.0 + rid, submit(rid))
    simulation.run()
    assert simulation.outcomes[0].placed == [pytest.approx(1.005)]
    assert simulation.outcomes[299].placed == [pytest.approx(300.0)]
    for pair in range(10):
        for rid in (2 * pair, 2 * pair + 1):
            simulation.arrive(400.0 + pair + 0.001 * rid, submit(1000 + rid))
    simulation.run()
    assert simulation.batches[300] == [1000]
    assert simulation.batches[-1] == [1018, 1019]


@BOTH
def test_as_many_as_there_are_places_start_at_once(settings: PolicySettings) -> None:
    simulation = Simulation(settings)
    for rid in range(8):
        simulation.arrive(1.0 + rid * 0.0001, submit(rid))
    simulation.run()
    assert simulation.batches == [list(range(8))]
    assert simulation.outcomes[0].placed == [pytest.approx(1.0007)]


@BOTH
def test_clients_in_a_loop_fill_the_house(settings: PolicySettings) -> None:
    """Eight clients that ask again as soon as they have their answer share each batch."""
    simulation = Simulation(settings, step_s=0.002)
    for client in range(8):
        simulation.arrive(0.01 + client * 0.0003, submit(client, client=client))
    for turn in range(1, 20):
        simulation.run()
        for client in range(8):
            request = submit(turn * 8 + client, client=client)
            simulation.arrive(simulation.now + client * 0.0004, request)
    simulation.run()
    assert statistics.mean(len(batch) for batch in simulation.batches) > 6
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())


@BOTH
def test_short_requests_behind_a_long_one_wait_at_most_the_cap(settings: PolicySettings) -> None:
    settings = msgspec.structs.replace(settings, hold_s=2.0)
    simulation = Simulation(settings)
    simulation.arrive(0.0, submit(0, tokens=2000))
    for rid in range(1, 60):
        simulation.arrive(rid * 0.35, submit(rid, tokens=16))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1, 60)]
    requeued = simulation.policy.report(0).requeued
    assert len(simulation.outcomes[0].tokens) == 2000
    if settings.batching == "joining":
        assert max(waits) <= 2 * 0.01
        assert requeued == 0
    else:
        assert max(waits) <= settings.hold_s + 2 * 0.01 + settings.fill_wait_s
        assert requeued >= 5


@BOTH
def test_with_one_row_at_a_time_the_long_request_goes_behind_and_still_ends(
    settings: PolicySettings,
) -> None:
    simulation = Simulation(msgspec.structs.replace(settings, hold_s=0.5), limits=ONE_ROW)
    simulation.arrive(0.0, submit(0, tokens=500))
    for rid in range(1, 40):  # more than the executor can do beside: the queue is never empty
        simulation.arrive(rid * 0.16, submit(rid, tokens=16))
    simulation.run()
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())
    assert simulation.outcomes[1].wait < 0.6
    assert simulation.policy.report(0).requeued >= 3


@BOTH
def test_two_long_requests_take_turns(settings: PolicySettings) -> None:
    simulation = Simulation(msgspec.structs.replace(settings, hold_s=0.5), limits=ONE_ROW)
    simulation.arrive(0.0, submit(1, tokens=300))
    simulation.arrive(0.1, submit(2, tokens=300))
    simulation.run()
    ends = [simulation.outcomes[rid].ended or 0.0 for rid in (1, 2)]
    assert abs(ends[0] - ends[1]) <= 0.6
    assert simulation.batches[:4] == [[1], [2], [1], [2]]


@BOTH
def test_slow_prefill_does_not_eat_the_turns(settings: PolicySettings) -> None:
    """A continuation pays its prefill again, so a turn decodes for as long as it prefilled."""
    simulation = Simulation(
        msgspec.structs.replace(settings, hold_s=0.5), limits=ONE_ROW, prefill_s_per_token=0.001
    )
    for rid in (1, 2):
        simulation.arrive(0.0, submit(rid, prompt=1000, tokens=400))
    simulation.run()
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())
    assert simulation.now < 25


@BOTH
def test_who_is_alone_is_never_interrupted(settings: PolicySettings) -> None:
    simulation = Simulation(settings)
    simulation.arrive(0.0, submit(1, tokens=2000))
    simulation.run()
    assert simulation.batches == [[1]]


@BOTH
def test_low_priority_still_moves_under_a_flood(settings: PolicySettings) -> None:
    flooded = msgspec.structs.replace(settings, ageing_s=1.0, queue_requests=4096, hold_s=1.0)
    simulation = Simulation(flooded)
    simulation.arrive(0.0, submit(0, tokens=16, priority=-2))
    for rid in range(1, 2000):  # twice of what the executor can do
        simulation.arrive(rid * 0.01, submit(rid, tokens=16, priority=2))
    simulation.run(until=30)
    # Four levels below: after four seconds it stands before all that come later.
    assert simulation.outcomes[0].tokens
    assert simulation.outcomes[0].wait < 10


@BOTH
def test_a_full_house_of_higher_priority_is_not_released_in_vain(settings: PolicySettings) -> None:
    simulation = Simulation(msgspec.structs.replace(settings, hold_s=0.5), limits=ONE_ROW)
    simulation.arrive(0.0, submit(1, tokens=300, priority=5))
    simulation.arrive(0.1, submit(2, tokens=300, priority=0))
    simulation.run()
    assert simulation.batches == [[1], [2]]


def test_deadlines_end_waiting_and_running_requests() -> None:
    simulation = Simulation(JOINING, limits=ONE_ROW)
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
    simulation = Simulation(JOINING, ready_at=ready_at)
    simulation.arrive(1.0, submit(1, prompt=prompt, tokens=tokens))
    simulation.run()
    assert simulation.outcomes[1].ends == [end]
    assert simulation.outcomes[1].accepted == ([max(1.0, ready_at)] if end == "done" else [])
    assert simulation.policy.report(0).refused == (end != "done")


def desk(**settings: float) -> SchedulerPolicy:
    """A policy that waits for nobody, and an executor of one row."""
    policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0, **settings))  # type: ignore[arg-type]  # numbers
    policy.executor_ready(ready(ONE_ROW), 0.0)
    return policy


def test_a_continuation_carries_all_its_tokens() -> None:
    policy = desk(hold_s=0.5)
    policy.submit(submit(7, prompt=3, tokens=9), 0.0)
    policy.tick(0.0)
    policy.update(output(placed=[7]), 0.0)
    policy.submit(submit(8), 0.1)
    policy.tick(0.1)
    assert schedule_of(policy.tick(0.6)).preempted == [7]
    policy.update(output(preempted={7: [5, 6]}), 1.0)
    policy.update(output(placed=[8]), 1.0)
    again = schedule_of(policy.tick(1.0)).new[7]
    assert again.token_ids == [1, 1, 1, 5, 6]
    assert (again.prompt_length, again.options.max_tokens) == (3, 9)


def test_new_settings_count_at_once_and_what_was_admitted_stays() -> None:
    policy = desk(hold_s=50.0)
    for rid in range(5):
        policy.submit(submit(rid), 0.0)
    policy.tick(0.0)
    policy.update(output(placed=[0]), 0.0)
    policy.adopt(PolicySettings(fill_wait_ms=0.0, hold_s=0.5, queue_requests=3))
    (refused,) = policy.submit(submit(5), 0.1)
    assert isinstance(refused, Failed)
    assert refused.code == "queue_full"
    assert schedule_of(policy.tick(0.6)).preempted == [0]
    policy.update(output(preempted={0: [5]}), 0.7)
    assert policy.report(0).refused == 1, "nobody who waited is refused now"
    policy.adopt(PolicySettings(batching="synchronous", fill_wait_ms=0.0))
    assert new_rows(policy.tick(0.7)) == []


def test_mail_of_another_incarnation_is_ignored() -> None:
    policy = desk()
    policy.submit(submit(1), 0.0)
    policy.tick(0.0)
    for number in (0, 2):
        policy.update(output(number, placed=[1]), 0.1)
        policy.update(output(number, finished=[1]), 0.1)
        policy.update(output(number, preempted={1: [2]}), 0.1)
    assert (policy.report(0).running, len(policy._running)) == (0, 1)
    policy.update(output(placed=[1]), 0.1)
    assert policy.report(0).running == 1
    policy.cancel(1)
    policy.update(output(preempted={1: [2]}), 0.1)
    assert (len(policy._running), policy.report(0).queued) == (0, 0)


def test_an_output_that_comes_late_or_twice_is_ignored() -> None:
    policy = desk()
    policy.submit(submit(1), 0.0)
    policy.tick(0.0)
    early, placed = output(finished=[1]), output(placed=[1])
    for told in (placed, placed, early):
        policy.update(told, 0.1)
    assert (policy.report(0).running, policy.report(0).rows) == (1, 1)


def test_a_row_whose_request_did_not_come_is_sent_again_and_no_other() -> None:
    policy = desk()
    for rid in (1, 2):
        policy.submit(submit(rid), 0.0)
    first = schedule_of(policy.tick(0.0))
    policy.update(output(seq=first.seq, placed=[1]), 0.1)
    second = schedule_of(policy.tick(0.1))
    assert (first.rows, second.rows, list(second.new)) == ([1], [2], [2])
    # It knows nothing yet of the second one.
    policy.update(output(seq=first.seq, missing=[2, 77]), 0.2)
    assert policy.tick(0.2) == []
    policy.update(output(seq=second.seq, missing=[2]), 0.3)
    third = schedule_of(policy.tick(0.3))
    assert (third.seq, third.rows, list(third.new)) == (second.seq + 1, [2], [2])


def test_cancel_reaches_the_executor_only_where_it_holds_the_row() -> None:
    policy = desk()
    for rid in (1, 2, 3):
        policy.submit(submit(rid), 0.0)
    policy.tick(0.0)
    policy.cancel(2)
    assert policy.tick(0.0) == []
    policy.cancel(1)
    assert schedule_of(policy.tick(0.0)).cancelled == [1]
    for rid in (1, 12345):
        policy.cancel(rid)
    assert policy.tick(0.0) == []
    policy.update(output(seq=SEEN), 0.1)
    assert [row.rid for row in policy._running] == [3]


def test_what_an_executor_holds_that_does_not_answer_is_bounded() -> None:
    policy = desk()
    for rid in range(100):
        policy.submit(submit(rid, priority=rid % 10), 0.0)
        policy.tick(0.0)
        policy.cancel(rid)
    assert len(policy._running) == 2


def test_a_place_is_not_counted_twice_while_its_last_token_is_told() -> None:
    policy = desk()
    for rid in (1, 2):
        policy.submit(submit(rid), 0.0)
        policy.tick(0.0)
        policy.update(output(placed=[rid]), 0.0)
    assert policy.report(0).running == 1


def test_requests_that_are_offered_and_have_no_place_count_as_waiting() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0, queue_requests=2))
    policy.executor_ready(ready(ONE_ROW), 0.0)
    for rid in (1, 2, 3):
        policy.submit(submit(rid, prompt=rid), 0.0)
        policy.tick(0.0)
        policy.update(output(placed=[1]), 0.0)
        policy.tick(0.0)
    load = policy.report(0)
    assert (load.running, load.places, load.queued, load.queued_tokens) == (1, 1, 2, 5)
    (refused,) = policy.submit(submit(4), 0.0)
    assert getattr(refused, "code", "") == "queue_full"


def test_what_the_next_executor_cannot_hold_ends_with_what_it_has() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.2), limits=ONE_ROW)
    for rid, tokens in ((1, 100), (2, 40), (3, 100), (4, 100)):
        simulation.arrive(0.0, submit(rid, prompt=10, tokens=tokens, client=rid))
    simulation.run(until=0.5)
    # Two were put back with their tokens, one runs, and one has not begun.
    simulation.limits = msgspec.structs.replace(ONE_ROW, max_total_tokens=60)
    simulation.lose(simulation.now, simulation.now + 0.1)
    simulation.run()
    ends = {rid: outcome.ends for rid, outcome in simulation.outcomes.items()}
    assert sorted(one for (one,) in ends.values()) == [
        "capacity_exceeded",
        "cut",
        "done",
        "executor_failed",
    ]
    (cut,) = [rid for rid, (end,) in ends.items() if end == "cut"]
    assert 0 < len(simulation.outcomes[cut].tokens) < 100
