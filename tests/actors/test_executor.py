from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import pytest
import structlog

from hearth.actors.executor import actor as executor_module
from hearth.actors.messages import SetLogLevel, Shutdown
from hearth.actors.supervisor_messages import ActorProgress, ExecutorMetrics
from hearth.runtime.executor.graph_cache import GraphCounters
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from tests.actors.executor_house import House, open_house
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.mail import next_mail


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def house(runtime: FakeRuntime) -> Iterator[House]:
    with open_house(runtime) as made:
        yield made


def row(
    rid: int, tokens: int = 3, generated: Sequence[int] = (), first: int = 1
) -> tuple[int, RowRequest]:
    options = RequestOptions(max_tokens=tokens)
    return rid, RowRequest(token_ids=[first, 2, *generated], prompt_length=2, options=options)


def test_offered_rows_get_places_and_run_to_their_end(house: House) -> None:
    house.offer(row(7, 2), row(8, 3))
    house.start()
    asked = time.monotonic()
    house.finish(7, 8)
    before, first, *_ = house.heard
    assert (before.seq, before.placed, before.tokens) == (1, [7, 8], [])
    assert (len(house.heard), first.rids) == (4, [7, 8])
    assert set(first.begun) == {7, 8}
    assert asked - 5 < first.begun[7] <= first.ended
    assert [step.finished for step in house.steps] == [[], [7], [8]]
    assert house.tokens() == {7: [100, 101], 8: [100, 101, 102]}


def test_a_row_joins_between_two_steps_of_the_others(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 3:
            house.offer(row(8, 2))

    runtime.before_step = before
    house.offer(row(7, 6))
    house.start()
    house.finish(7)
    assert [step.rids for step in house.steps] == [[7], [7], [7], [8], [7, 8], [7], [7]]
    assert house.placed == [[7], [8]]


def test_a_place_is_taken_at_the_border_at_which_it_frees_in_the_offered_order(
    house: House, runtime: FakeRuntime
) -> None:
    runtime.places = 2
    house.offer(row(1, 2), row(2, 4), order=0.0)
    house.offer(row(3, 3), order=5.0)
    house.offer(row(4, 2), order=1.0)
    house.start()
    house.finish(1, 2, 3, 4)
    assert house.placed == [[1, 2], [4], [3]]
    steps = [step.rids for step in house.steps]
    assert steps == [[1, 2], [1, 2], [4], [2, 4], [3], [2, 3], [3]]


def test_a_continuation_goes_on(house: House) -> None:
    house.offer(row(7, 5, generated=[100, 101]))
    house.start()
    assert house.tokens() == {7: [102, 103, 104]}


def test_cancel_between_steps_ends_one_row_and_is_answered(
    house: House, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 3:
            house.mark("cancelled", 7)

    runtime.before_step = before
    house.offer(row(7, 50), row(8, 6))
    house.start()
    tokens = house.tokens()
    assert len(tokens[7]) == 3
    assert len(tokens[8]) == 6
    assert runtime.left == [0]
    assert house.heard[-1].seq == house.seq


def test_a_cancelled_offer_never_gets_a_place(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 2:
            house.mark("cancelled", 8)

    runtime.places, runtime.before_step = 1, before
    house.offer(row(7, 4), row(8), row(9))
    house.start()
    house.finish(9)
    assert house.placed == [[7], [9]]
    assert house.heard[-1].seq == house.seq


def test_a_row_whose_request_is_lost_is_missed_until_it_comes(house: House) -> None:
    (rid, lost), other = row(7), row(8, 1)
    house.wanted = [(0.0, rid)]
    house.offer(other, order=1.0)
    house.start()
    assert house.hear_of(1).missing == [7]
    house.finish(8)
    house.schedule({rid: lost})
    house.finish(7)
    assert house.placed == [[8], [7]]
    assert house.heard[-1].missing == []


def test_rows_that_were_given_up_can_be_wanted_again(house: House) -> None:
    house.offer(row(8))
    house.withdraw(8)
    house.start()
    house.hear_of(2)
    house.offer(row(8))
    house.finish(8)
    assert house.placed == [[8]]
    assert house.tokens() == {8: [100, 101, 102]}


def test_a_row_is_remembered_until_its_end_has_been_heard(house: House) -> None:
    house.offer(row(7, 1))
    house.start()
    house.finish(7)
    # The scheduler had not heard of it, and sent its request once more.
    house.schedule(dict([row(7, 1)]))
    assert house.hear_of(2).missing == []
    assert house.placed == [[7]]
    house.schedule(dict([row(7, 2)]), heard=len(house.heard))
    house.finish(7)
    assert house.placed == [[7], [7]]


def test_a_revocation_takes_back_what_has_no_place_and_nothing_else(
    house: House, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 2:
            house.withdraw(7, 9)

    runtime.places, runtime.before_step = 1, before
    house.offer(row(7, 4), row(8), row(9))
    house.start()
    house.finish(8)
    assert house.placed == [[7], [8]]
    assert house.tokens().keys() == {7, 8}


def test_a_released_row_comes_back_with_all_tokens_and_its_place_is_taken(
    house: House, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 4:
            house.mark("preempted", 7)

    runtime.places, runtime.before_step = 2, before
    house.offer(row(7, 50, generated=[100]), row(8, 8), row(9, 2))
    house.start()
    house.finish(8, 9)
    assert house.preempted == [(7, [100, 101, 102, 103, 104])]
    place = next(place for place, one in enumerate(house.heard) if one.preempted)
    assert sum(bool(one.tokens) for one in house.heard[:place]) == 4
    assert house.heard[place].placed == [9]
    assert house.placed == [[7, 8], [9]]


def test_a_release_of_what_has_ended_or_was_never_here_is_ignored(
    house: House, runtime: FakeRuntime
) -> None:
    house.mark("preempted", 9)
    runtime.before_step = lambda step: house.mark("preempted", 8) if step == 4 else None
    house.offer(row(7, 20), row(8, 4))
    house.start()
    assert len(house.tokens()[7]) == 20
    assert house.preempted == []


def test_a_release_waits_until_the_row_has_paid_its_prefill(
    house: House, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 1:
            house.mark("preempted", 7)
        time.sleep(0.1 if step == 1 else 0.03)

    runtime.before_step = before
    house.offer(row(7, 50))
    house.start()
    _, generated = house.hear_until("preempted")
    assert 4 <= len(generated) <= 6


def test_a_row_gives_way_at_once_where_it_has_to(house: House, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 1:
            house.mark("preempted", 7)
            time.sleep(0.3)
        if step == 2:
            house.mark("urgent", 7)
            time.sleep(0.02)

    runtime.before_step = before
    house.offer(row(7, 50))
    house.start()
    _, generated = house.hear_until("preempted")
    assert len(generated) == 2


def test_a_row_that_cannot_be_served_fails_alone(house: House, runtime: FakeRuntime) -> None:
    runtime.places = 2
    house.offer(row(7), row(8, first=-1), row(9))
    house.start()
    failed = house.hear_until("failed")
    assert (failed.rids, failed.code, failed.field) == ([8], "invalid_value", "token_ids")
    house.finish(7, 9)
    assert runtime.begun == [2]


def test_shutdown_fails_what_runs_and_what_waits(house: House, runtime: FakeRuntime) -> None:
    runtime.before_step = lambda _step: time.sleep(0.01)
    runtime.places = 1
    house.offer(row(7, 10_000), row(8))
    house.start()
    house.hear_until("steps")
    house.offer(row(9))
    house.control.post(Shutdown())
    house.join()
    failed = house.hear_until("failed")
    assert (failed.rids, failed.code) == ([7, 8, 9], "shutting_down")
    assert house.failures == []


def test_one_that_retires_ends_with_its_rows_and_gives_the_others_back(
    house: House, runtime: FakeRuntime
) -> None:
    runtime.before_step = lambda _step: time.sleep(0.01)
    runtime.places = 1
    house.offer(row(7, 60), row(8))
    house.start()
    house.hear_until("steps")
    house.control.post(Shutdown(after_rows=True))
    while not house.heard[-1].retiring:
        assert house.hear(5)
    house.offer(row(9))
    house.finish(7)
    house.join()
    assert [one.retiring for one in house.heard].count(True) == 1
    assert {rid for step in house.steps for rid in step.rids} == {7}
    assert (house.failed, house.failures) == ([], [])


def test_progress_is_told_while_idle_and_busy(
    house: House, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "PROGRESS_S", 0.05)
    house.start()
    idle = [next_mail(house.supervisor, 2) for _ in range(3)]
    nothing = ExecutorMetrics(StageMetrics(), StageMetrics(), EagleGenerationMetrics())
    assert idle == [ActorProgress("executor-1", nothing)] * 3

    def slow(_step: int) -> None:
        time.sleep(0.01)
        runtime.generation_metrics.record(5, 0.5)

    runtime.before_step = slow
    runtime.speculation_metrics.rounds = 4
    runtime.multimodal_metrics.images = 2
    runtime.graphs["base"] = GraphCounters(captures=3, hits=2)
    runtime.memory["weights"], runtime.device_free = 5, 6
    house.offer(row(7, 60))
    house.finish(7)
    told = []
    while (message := house.supervisor.receive_nowait()) is not None:
        told.append(message)
    metrics = [one.metrics for one in told if isinstance(one, ActorProgress) and one.metrics]
    steps = [one.generation.steps for one in metrics]
    # A busy machine takes longer over a step, and so tells of more of them.
    assert 3 <= len(set(steps)) < 60
    assert steps == sorted(steps)
    assert metrics[-1].generation.tokens == 5 * steps[-1]
    assert (metrics[-1].speculation.rounds, metrics[-1].images.images) == (4, 2)
    assert metrics[-1].graphs == {"base": GraphCounters(captures=3, hits=2)}
    assert (metrics[-1].memory, metrics[-1].device_free) == ({"weights": 5}, 6)


def test_the_log_level_is_taken_over(house: House) -> None:
    house.start()
    house.control.post(SetLogLevel("error"))
    house.control.post(Shutdown())
    house.join()
    try:
        assert not structlog.get_logger("executor").is_enabled_for(logging.WARNING)
        assert structlog.get_logger("executor").is_enabled_for(logging.ERROR)
    finally:
        structlog.reset_defaults()


def test_whoever_comes_before_the_next_step_is_queued_is_in_it(
    house: House, runtime: FakeRuntime
) -> None:
    def later(step: int) -> None:
        # The first step has been queued; there is time until the second has to be.
        runtime.queue_by = time.monotonic() + 30 if step == 1 else 0.0

    runtime.before_step = later
    house.offer(row(1, 4))
    house.start()
    house.hear_until("steps")
    house.offer(row(2, 4))
    house.finish(1, 2)
    # The second step of all is the first of the newcomer.
    assert [step.rids for step in house.steps][:3] == [[1], [2], [1, 2]]


def test_nobody_is_waited_for_where_no_place_is_free(house: House, runtime: FakeRuntime) -> None:
    runtime.places = 1
    runtime.queue_by = time.monotonic() + 600
    house.offer(row(1, 4))
    house.start()
    house.finish(1)
    assert runtime.steps == 4


def test_an_executor_that_waits_for_offers_stops_when_told(
    house: House, runtime: FakeRuntime
) -> None:
    runtime.queue_by = time.monotonic() + 600
    house.start()
    house.control.post(Shutdown())
    house.join()
