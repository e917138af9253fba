from __future__ import annotations

import itertools
import statistics
from unittest.mock import ANY

import msgspec
import pytest

from hearth.actors.messages import Accepted, Failed, Request, RowsCut
from hearth.actors.scheduler.policy import SchedulerPolicy
from hearth.actors.settings import PolicySettings
from hearth.runtime.request import RequestOptions
from tests.actors.scheduler.simulation import (
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


def several(rid: int, *siblings: int, prompt: int = 10) -> Request:
    options = RequestOptions(max_tokens=16, seed=5)
    return Request(rid, options, token_ids=[1] * prompt, siblings=[*siblings])


def test_a_request_for_several_replies_is_admitted_whole_or_refused_whole() -> None:
    policy = desk(queue_requests=4, queue_tokens=100)
    policy.submit(submit(1), 0.0)
    # None of it waits, though two of its four had found room.
    assert policy.submit(several(2, 3, 4, 5), 0.0) == [
        Failed([2, 3, 4, 5], "queue_full", ANY, "queue_requests", 1)
    ]
    assert policy.submit(several(2, 3, 4, prompt=31), 0.0) == [
        Failed([2, 3, 4], "queue_full", ANY, "queue_tokens", 1)
    ]
    assert (policy.report(0).queued, policy.report(0).refused) == (1, 2)
    assert policy.submit(several(2, 3, 4), 0.0) == [Accepted(2, 10, 0.0)]
    # Those that have not begun have their room already.
    (refused,) = policy.submit(submit(6), 0.0)
    assert getattr(refused, "code", "") == "queue_full"
    assert (policy.report(0).queued, policy.report(0).queued_tokens) == (4, 40)
    # No request is refused for ever.
    alone = desk(queue_requests=2, queue_tokens=100)
    assert alone.submit(several(1, 2, 3, prompt=50), 0.0) == [Accepted(1, 50, 0.0)]


def test_further_replies_begin_when_the_first_has_a_token_with_seeds_of_their_own() -> None:
    policy = SchedulerPolicy(PolicySettings(fill_wait_ms=0.0))
    policy.executor_ready(ready(LIMITS), 0.0)
    policy.submit(several(1, 2, 3, 4), 0.0)
    assert new_rows(policy.tick(0.0)) == [1]
    policy.update(output(placed=[1]), 0.0)
    policy.cancel(3)
    # As the tokenizer does where a stop string has come: its others go on.
    policy.cancel(1)
    assert new_rows(policy.tick(0.1)) == []
    policy.update(output(slot_times={1: 0.0}), 0.2)
    rows = schedule_of(policy.tick(0.2)).new
    assert {rid: row.options.seed for rid, row in rows.items()} == {2: 6, 4: 8}
    assert all(row.token_ids == [1] * 10 for row in rows.values())
    policy.update(output(finished=[1], placed=[2, 4]), 0.3)
    policy.update(output(finished=[2, 4]), 0.4)
    assert (policy.report(0).queued, policy.report(0).running) == (0, 0)


def test_further_replies_are_cut_with_the_first() -> None:
    policy = desk(hold_s=0.5)
    for request in (several(1, 2), submit(9)):
        policy.submit(request, 0.0)
        policy.tick(0.0)
    policy.update(output(placed=[1]), 0.0)
    policy.tick(0.6)
    # Its first token and its preemption are told at once.
    policy.update(output(preempted={1: [5]}), 0.7)
    small = msgspec.structs.replace(ONE_ROW, max_total_tokens=20)
    assert RowsCut([1, 2]) in policy.executor_ready(ready(small, 2), 0.8)
    assert policy.report(0).queued == 0


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


SETTINGS = PolicySettings()
TWO_ROWS = msgspec.structs.replace(LIMITS, max_batch=2)
STEP_S = 0.01


def test_a_request_takes_a_free_place_at_the_next_border() -> None:
    simulation = Simulation(SETTINGS)
    simulation.arrive(0.0, submit(1, tokens=200))
    simulation.arrive(0.503, submit(2))
    simulation.run()
    assert simulation.outcomes[2].wait <= 2 * STEP_S
    assert simulation.batches == [[1], [1, 2], [1]]


@pytest.mark.parametrize("lag_s", [0.0, 0.004])
def test_a_place_is_taken_at_the_very_border_at_which_it_frees(lag_s: float) -> None:
    simulation = Simulation(SETTINGS, limits=TWO_ROWS, lag_s=lag_s)
    for rid in range(10):
        simulation.arrive(0.0, submit(rid, tokens=10 + rid))
    simulation.run()
    steps = simulation.executors[0].steps
    assert sum(len(rids) for rids in steps) == sum(10 + rid for rid in range(10))
    # The harness is full as long as there is somebody who could be placed.
    last = next(number for number, rids in enumerate(steps) if 9 in rids)
    assert {len(rids) for rids in steps[:last]} == {2}


def test_the_row_placed_first_gives_way_to_who_waits_and_the_others_go_on() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5), limits=TWO_ROWS)
    for rid in (1, 2):
        simulation.arrive(rid * 0.1, submit(rid, tokens=100))
    simulation.arrive(0.3, submit(3, tokens=5))
    simulation.run()
    assert simulation.batches[:4] == [[1], [1, 2], [2, 3], [2, 1]]
    assert simulation.outcomes[3].placed == [pytest.approx(0.105 + 0.5, abs=2 * STEP_S)]
    assert simulation.policy.report(0).requeued == 1


def test_the_lowest_priority_gives_way_first() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.5, ageing_s=0.1), limits=TWO_ROWS)
    simulation.arrive(0.0, submit(1, tokens=300, priority=1))
    simulation.arrive(0.0, submit(2, tokens=300, priority=0))
    simulation.arrive(0.3, submit(3, tokens=10))
    simulation.run(until=1.0)
    assert simulation.batches[:2] == [[1, 2], [1, 3]]


def test_one_that_has_paid_gives_way_before_one_whose_prompt_is_still_read() -> None:
    simulation = Simulation(
        PolicySettings(hold_s=0.5),
        limits=TWO_ROWS,
        prefill_s_per_token=0.001,
        chunk_s=0.02,
        lag_s=0.001,
    )
    simulation.arrive(0.0, submit(1, prompt=3000, tokens=300))
    simulation.arrive(0.1, submit(2, prompt=10, tokens=300))
    simulation.arrive(0.3, submit(3, prompt=10, tokens=5))
    simulation.run()
    # The first has had its place for longer, and would give way after six seconds.
    assert simulation.outcomes[3].placed[0] < 0.7
    assert len(simulation.outcomes[1].placed) == 1


def test_without_anybody_who_waits_nobody_gives_way() -> None:
    simulation = Simulation(PolicySettings(hold_s=0.1), limits=TWO_ROWS)
    for rid in (1, 2):
        simulation.arrive(0.0, submit(rid, tokens=300))
    simulation.run()
    assert simulation.batches == [[1, 2]]


def test_a_higher_priority_takes_one_place_at_once() -> None:
    simulation = Simulation(SETTINGS)
    for rid in range(8):
        simulation.arrive(0.0, submit(rid, tokens=190))
    simulation.arrive(0.2, submit(9, tokens=20, priority=1))
    simulation.run()
    assert simulation.outcomes[9].wait <= 3 * STEP_S
    assert simulation.policy.report(0).requeued == 1
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())
    # Seven others had a token from every step meanwhile.
    kept = [rid for rid in range(8) if len(simulation.outcomes[rid].placed) == 1]
    assert len(kept) == 7
    for rid in kept:
        tokens = simulation.outcomes[rid].tokens
        gaps = [later - one for one, later in itertools.pairwise(tokens)]
        assert max(gaps) <= STEP_S + 1e-6


def test_a_higher_priority_does_not_take_back_what_a_prefill_has_cost() -> None:
    simulation = Simulation(SETTINGS, limits=TWO_ROWS, prefill_s_per_token=0.001)
    for rid in (1, 2):
        simulation.arrive(0.0, submit(rid, prompt=300, tokens=100))
    simulation.arrive(0.7, submit(3, prompt=1, tokens=2, priority=5))
    simulation.run()
    # Both were prefilled by 0.605 s, at 0.3 s each.
    assert simulation.outcomes[3].placed[0] == pytest.approx(0.605 + 0.3, abs=2 * STEP_S)


def test_who_is_higher_is_offered_in_place_of_the_last() -> None:
    simulation = Simulation(PolicySettings(hold_s=100.0), limits=TWO_ROWS)
    for rid in range(6):
        simulation.arrive(0.0, submit(rid, tokens=50 + rid, priority=0))
    simulation.arrive(0.1, submit(10, tokens=10, priority=0))
    simulation.arrive(0.2, submit(11, tokens=10, priority=1))
    simulation.run()
    assert simulation.withdrawn >= 1
    placed = sorted(simulation.outcomes, key=lambda rid: simulation.outcomes[rid].placed[0])
    assert placed == [0, 1, 11, 2, 3, 4, 5, 10]
    assert all(outcome.ends == ["done"] for outcome in simulation.outcomes.values())


def test_a_client_that_floods_does_not_hold_up_another() -> None:
    simulation = Simulation(PolicySettings(hold_s=100.0, queue_requests=1000))
    for rid in range(500):
        simulation.arrive(0.0, submit(rid, client=1, tokens=20))
    for rid in range(1000, 1010):
        simulation.arrive((rid - 999) * 0.3, submit(rid, client=2, tokens=20))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1000, 1010)]
    # One turnover of the harness: the rows that were offered ahead give way.
    assert max(waits) <= 20 * STEP_S + 3 * STEP_S
    assert simulation.outcomes[499].wait > 10


def test_one_client_s_requests_keep_the_order_of_priority_and_ageing() -> None:
    simulation = Simulation(
        PolicySettings(hold_s=100.0), limits=msgspec.structs.replace(LIMITS, max_batch=1)
    )
    for rid, priority in enumerate((0, 0, 0, 1, -1, 2)):
        simulation.arrive(0.0, submit(rid, priority=priority, client=3))
    simulation.run()
    placed = sorted(simulation.outcomes, key=lambda rid: simulation.outcomes[rid].placed[0])
    assert placed == [5, 3, 0, 1, 2, 4]


def test_offered_rows_are_cancelled_and_expire_as_those_of_the_queue_do() -> None:
    simulation = Simulation(SETTINGS, limits=TWO_ROWS)
    for rid in range(2):
        simulation.arrive(0.0, submit(rid, tokens=100))
    simulation.arrive(0.1, submit(2, deadline=0.3))
    simulation.arrive(0.1, submit(3))
    simulation.cancel(0.2, 3)
    simulation.run()
    assert simulation.outcomes[2].ends == ["deadline_exceeded"]
    assert simulation.outcomes[2].ended == pytest.approx(0.3)
    assert [simulation.outcomes[rid].placed for rid in (2, 3)] == [[], []]


def test_a_batch_keeps_the_rows_that_it_began_with() -> None:
    simulation = Simulation(SYNCHRONOUS)
    simulation.arrive(0.0, submit(1, tokens=50))
    simulation.arrive(0.05, submit(2))
    simulation.run()
    assert simulation.batches == [[1], [2]]


def test_a_free_executor_lets_the_next_batch_fill_although_one_has_waited() -> None:
    simulation = Simulation(SYNCHRONOUS, step_s=0.002)
    simulation.arrive(0.0, submit(1, tokens=50))
    simulation.arrive(0.05, submit(2))
    simulation.run(until=0.1)
    simulation.arrive(0.1055 + 0.003, submit(3))  # as it ends at 0.105
    simulation.run()
    assert simulation.batches == [[1], [2, 3]]


def test_after_a_release_nobody_waits_again() -> None:
    settings = msgspec.structs.replace(SYNCHRONOUS, hold_s=0.5, fill_wait_ms=100.0)
    simulation = Simulation(settings)
    simulation.arrive(0.0, submit(1, tokens=100))
    simulation.arrive(0.2, submit(2))
    simulation.run()
    assert simulation.batches == [[1], [2, 1], [1]]
    assert simulation.outcomes[2].wait < 0.5 + 0.1 - 0.2 + 0.03


def test_a_full_batch_whose_rows_have_ended_is_released_like_any_other() -> None:
    limits = msgspec.structs.replace(LIMITS, max_batch=2)
    simulation = Simulation(SYNCHRONOUS, limits=limits)
    for rid, tokens in ((1, 3000), (2, 20)):
        simulation.arrive(0.0, submit(rid, tokens=tokens, priority=10))
    simulation.arrive(0.1, submit(3))
    simulation.run()
    assert simulation.outcomes[3].wait < SYNCHRONOUS.hold_s + 0.1
    assert simulation.outcomes[1].ends == ["done"]


def test_a_high_priority_request_waits_one_batch_at_most() -> None:
    simulation = Simulation(SYNCHRONOUS)
    for rid in range(200):
        simulation.arrive(rid * 0.001, submit(rid, tokens=64, priority=0))
    for urgent in range(1000, 1010):
        simulation.arrive((urgent - 999) * 0.7, submit(urgent, priority=5))
    simulation.run()
    waits = [simulation.outcomes[rid].wait for rid in range(1000, 1010)]
    assert max(waits) <= 64 * 0.01 + SYNCHRONOUS.fill_wait_s + 0.02
