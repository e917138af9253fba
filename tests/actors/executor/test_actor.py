from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import structlog
from msgspec import structs
from numpy.typing import NDArray

from hearth.actors.arena import Arena, ArenaSlots
from hearth.actors.executor import actor as executor_module
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.messages import (
    Encoded,
    EncodeFailed,
    ImageTimes,
    RunVisionEncoder,
    SetAdapter,
    SetLogLevel,
    Shutdown,
)
from hearth.actors.supervisor_messages import ActorProgress, ExecutorMetrics
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from tests.actors.executor.harness import Harness, open_harness, rids_of
from tests.actors.fake_runtime import FakeGrammars, FakeRuntime
from tests.actors.mailboxes import next_mail
from tests.runtime.vision.tower_config import config_of


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def harness(runtime: FakeRuntime) -> Iterator[Harness]:
    with open_harness(runtime) as made:
        yield made


def row(
    rid: int, tokens: int = 3, generated: Sequence[int] = (), first: int = 1
) -> tuple[int, RowRequest]:
    options = RequestOptions(max_tokens=tokens)
    return rid, RowRequest(token_ids=[first, 2, *generated], prompt_length=2, options=options)


def test_offered_rows_get_places_and_run_to_their_end(harness: Harness) -> None:
    harness.offer(row(7, 2), row(8, 3))
    harness.start()
    asked = time.monotonic()
    harness.finish(7, 8)
    before, first, *_ = harness.heard
    assert (before.seq, before.placed, before.tokens) == (1, [7, 8], [])
    assert (len(harness.heard), rids_of(first)) == (4, [7, 8])
    assert set(first.slot_times) == {7, 8}
    assert asked - 5 < first.slot_times[7] <= first.ended
    assert [step.finished for step in harness.steps] == [[], [7], [8]]
    assert harness.tokens() == {7: [100, 101], 8: [100, 101, 102]}


def test_a_row_joins_between_two_steps_of_the_others(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 3:
            harness.offer(row(8, 2))

    runtime.before_step = before
    harness.offer(row(7, 6))
    harness.start()
    harness.finish(7)
    assert [rids_of(step) for step in harness.steps] == [[7], [7], [7], [8], [7, 8], [7], [7]]
    assert harness.placed == [[7], [8]]


def test_a_place_is_taken_at_the_border_at_which_it_frees_in_the_offered_order(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.places = 2
    harness.offer(row(1, 2), row(2, 4), order=0.0)
    harness.offer(row(3, 3), order=5.0)
    harness.offer(row(4, 2), order=1.0)
    harness.start()
    harness.finish(1, 2, 3, 4)
    assert harness.placed == [[1, 2], [4], [3]]
    steps = [rids_of(step) for step in harness.steps]
    assert steps == [[1, 2], [1, 2], [4], [2, 4], [3], [2, 3], [3]]


def test_a_row_waits_without_a_place_for_its_grammar_and_keeps_nobody_back(
    harness: Harness, runtime: FakeRuntime
) -> None:
    compiled = os.eventfd(0)
    runtime.grammars = FakeGrammars(compiled)
    runtime.grammars.compiling = {"slow"}
    held = row(7, 2)
    held[1].options = structs.replace(held[1].options, grammar="slow")
    harness.offer(held, row(8, 2))
    harness.start()
    harness.finish(8)
    assert harness.placed == [[8]]
    runtime.grammars.compiling = set()
    os.eventfd_write(compiled, 1)
    harness.finish(7)
    assert harness.placed == [[8], [7]]
    os.close(compiled)


def test_a_grammar_that_no_row_waits_for_any_more_need_not_be_compiled(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.grammars = FakeGrammars()
    runtime.grammars.compiling = {"slow"}
    held = row(7, 2)
    held[1].options = structs.replace(held[1].options, grammar="slow")
    harness.offer(held)
    harness.start()
    harness.hear_of(harness.seq)
    assert runtime.grammars.kept == [{"slow"}]
    harness.mark("cancelled", 7)
    harness.hear_of(harness.seq)
    assert runtime.grammars.kept == [{"slow"}, set()]
    harness.offer(row(8, 2))
    harness.finish(8)


def test_a_row_whose_grammar_cannot_be_compiled_fails_alone(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.grammars = FakeGrammars()
    bad = row(7, 2)
    bad[1].options = structs.replace(bad[1].options, grammar="bad")
    harness.offer(bad, row(8, 2))
    harness.start()
    harness.finish(7, 8)
    (failure,) = harness.failed
    assert (failure.rids, failure.code, failure.field) == ([7], "grammar_invalid", "grammar")
    assert harness.placed == [[8]]
    assert not runtime.rows


def test_a_continuation_goes_on(harness: Harness) -> None:
    harness.offer(row(7, 5, generated=[100, 101]))
    harness.start()
    assert harness.tokens() == {7: [102, 103, 104]}


def test_cancel_between_steps_ends_one_row_and_is_answered(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 3:
            harness.mark("cancelled", 7)

    runtime.before_step = before
    harness.offer(row(7, 50), row(8, 6))
    harness.start()
    tokens = harness.tokens()
    assert len(tokens[7]) == 3
    assert len(tokens[8]) == 6
    assert runtime.left == [7]
    assert harness.heard[-1].seq == harness.seq


def test_a_cancelled_offer_never_gets_a_place(harness: Harness, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 2:
            harness.mark("cancelled", 8)

    runtime.places, runtime.before_step = 1, before
    harness.offer(row(7, 4), row(8), row(9))
    harness.start()
    harness.finish(9)
    assert harness.placed == [[7], [9]]
    assert harness.heard[-1].seq == harness.seq


def test_a_row_whose_request_is_lost_is_missed_until_it_comes(harness: Harness) -> None:
    (rid, lost), other = row(7), row(8, 1)
    harness.wanted = [(0.0, rid)]
    harness.offer(other, order=1.0)
    harness.start()
    assert harness.hear_of(1).missing == [7]
    harness.finish(8)
    harness.schedule({rid: lost})
    harness.finish(7)
    assert harness.placed == [[8], [7]]
    assert harness.heard[-1].missing == []


def test_rows_that_were_given_up_can_be_wanted_again(harness: Harness) -> None:
    harness.offer(row(8))
    harness.withdraw(8)
    harness.start()
    harness.hear_of(2)
    harness.offer(row(8))
    harness.finish(8)
    assert harness.placed == [[8]]
    assert harness.tokens() == {8: [100, 101, 102]}


def test_a_row_is_remembered_until_its_end_has_been_heard(harness: Harness) -> None:
    harness.offer(row(7, 1))
    harness.start()
    harness.finish(7)
    # The scheduler had not heard of it, and sent its request once more.
    harness.schedule(dict([row(7, 1)]))
    assert harness.hear_of(2).missing == []
    assert harness.placed == [[7]]
    harness.schedule(dict([row(7, 2)]), heard=len(harness.heard))
    harness.finish(7)
    assert harness.placed == [[7], [7]]


def test_a_revocation_takes_back_what_has_no_place_and_nothing_else(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 2:
            harness.withdraw(7, 9)

    runtime.places, runtime.before_step = 1, before
    harness.offer(row(7, 4), row(8), row(9))
    harness.start()
    harness.finish(8)
    assert harness.placed == [[7], [8]]
    assert harness.tokens().keys() == {7, 8}


def test_a_released_row_comes_back_with_all_tokens_and_its_place_is_taken(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 4:
            harness.mark("preempted", 7)

    runtime.places, runtime.before_step = 2, before
    harness.offer(row(7, 50, generated=[100]), row(8, 8), row(9, 2))
    harness.start()
    harness.finish(8, 9)
    assert harness.preempted == [(7, [100, 101, 102, 103, 104])]
    place = next(place for place, one in enumerate(harness.heard) if one.preempted)
    assert sum(bool(one.tokens) for one in harness.heard[:place]) == 4
    assert harness.heard[place].placed == [9]
    assert harness.placed == [[7, 8], [9]]


def test_a_release_of_what_has_ended_or_was_never_here_is_ignored(
    harness: Harness, runtime: FakeRuntime
) -> None:
    harness.mark("preempted", 9)
    runtime.before_step = lambda step: harness.mark("preempted", 8) if step == 4 else None
    harness.offer(row(7, 20), row(8, 4))
    harness.start()
    assert len(harness.tokens()[7]) == 20
    assert harness.preempted == []


def test_a_release_waits_until_the_row_has_paid_its_prefill(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def before(step: int) -> None:
        if step == 1:
            harness.mark("preempted", 7)
        time.sleep(0.1 if step == 1 else 0.03)

    runtime.before_step = before
    harness.offer(row(7, 50))
    harness.start()
    _, generated = harness.hear_until("preempted")
    assert 4 <= len(generated) <= 6


def test_a_row_gives_way_at_once_where_it_has_to(harness: Harness, runtime: FakeRuntime) -> None:
    def before(step: int) -> None:
        if step == 1:
            harness.mark("preempted", 7)
            time.sleep(0.3)
        if step == 2:
            harness.mark("urgent", 7)
            time.sleep(0.02)

    runtime.before_step = before
    harness.offer(row(7, 50))
    harness.start()
    _, generated = harness.hear_until("preempted")
    assert len(generated) == 2


def test_a_row_that_cannot_be_served_fails_alone(harness: Harness, runtime: FakeRuntime) -> None:
    runtime.places = 2
    harness.offer(row(7), row(8, first=-1), row(9))
    harness.start()
    failed = harness.hear_until("failed")
    assert (failed.rids, failed.code, failed.field) == ([8], "invalid_value", "token_ids")
    harness.finish(7, 9)
    assert runtime.begun == [2]


def test_shutdown_fails_what_runs_and_what_waits(harness: Harness, runtime: FakeRuntime) -> None:
    runtime.before_step = lambda _step: time.sleep(0.01)
    runtime.places = 1
    harness.offer(row(7, 10_000), row(8))
    harness.start()
    harness.hear_until("steps")
    harness.offer(row(9))
    harness.control.post(Shutdown())
    harness.join()
    failed = harness.hear_until("failed")
    assert (failed.rids, failed.code) == ([7, 8, 9], "shutting_down")
    assert harness.failures == []


def test_one_that_retires_ends_with_its_rows_and_gives_the_others_back(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.before_step = lambda _step: time.sleep(0.01)
    runtime.places = 1
    harness.offer(row(7, 60), row(8))
    harness.start()
    harness.hear_until("steps")
    harness.control.post(Shutdown(after_rows=True))
    while not harness.heard[-1].retiring:
        assert harness.hear(5)
    harness.offer(row(9))
    harness.finish(7)
    harness.join()
    assert [one.retiring for one in harness.heard].count(True) == 1
    assert {rid for step in harness.steps for rid in rids_of(step)} == {7}
    assert (harness.failed, harness.failures) == ([], [])


def test_progress_is_told_while_idle_and_busy(
    harness: Harness, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "PROGRESS_S", 0.05)
    harness.start()
    idle = [next_mail(harness.supervisor, 2) for _ in range(3)]
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
    harness.offer(row(7, 60))
    harness.finish(7)
    told = []
    while (message := harness.supervisor.receive_nowait()) is not None:
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


def test_the_log_level_is_taken_over(harness: Harness) -> None:
    harness.start()
    harness.control.post(SetLogLevel("error"))
    harness.control.post(Shutdown())
    harness.join()
    try:
        assert not structlog.get_logger("executor").is_enabled_for(logging.WARNING)
        assert structlog.get_logger("executor").is_enabled_for(logging.ERROR)
    finally:
        structlog.reset_defaults()


def test_whoever_comes_before_the_next_step_is_queued_is_in_it(
    harness: Harness, runtime: FakeRuntime
) -> None:
    def later(step: int) -> None:
        # The first step has been queued; there is time until the second has to be.
        runtime.queue_by = time.monotonic() + 30 if step == 1 else 0.0

    runtime.before_step = later
    harness.offer(row(1, 4))
    harness.start()
    harness.hear_until("steps")
    harness.offer(row(2, 4))
    harness.finish(1, 2)
    # The second step of all is the first of the newcomer.
    assert [rids_of(step) for step in harness.steps][:3] == [[1], [2], [1, 2]]


def test_nobody_is_waited_for_where_no_place_is_free(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.places = 1
    runtime.queue_by = time.monotonic() + 600
    harness.offer(row(1, 4))
    harness.start()
    harness.finish(1)
    assert runtime.steps == 4


def test_an_executor_that_waits_for_offers_stops_when_told(
    harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.queue_by = time.monotonic() + 600
    harness.start()
    harness.control.post(Shutdown())
    harness.join()


CONFIG = config_of("qwen3_vl", position_side=4, patch_size=2, deepstack_layers=(0,))
LAYOUT = ImageLayout(8, 8, (1, 4, 4), 4)
OUTPUTS = (2, 4, CONFIG.output_size)
GONE = Slot(0, 64, 999)
Arenas = tuple[VisionEncoderMemory, ArenaSlots, ArenaSlots]


@pytest.fixture
def memory() -> Iterator[Arenas]:
    patches, embeddings = (Arena.create(name, 1 << 16) for name in ("patches", "embeddings"))
    yield VisionEncoderMemory(CONFIG, patches, embeddings), patches.slots(), embeddings.slots()
    patches.close()
    embeddings.close()


def run_tower(memory: Arenas, number: int, level: int = 1) -> RunVisionEncoder:
    arenas, patches, embeddings = memory
    given, target = patches.take(16 * CONFIG.patch_bytes), embeddings.take(4 * prod(OUTPUTS))
    assert given is not None
    assert target is not None
    arenas.patches.view(given)[:] = bytes([level]) * given.size
    return RunVisionEncoder(number, LAYOUT, given, target)


def embedded(memory: Arenas, sent: RunVisionEncoder) -> NDArray[Any]:
    return memory[0].embeddings.array(sent.target, OUTPUTS, np.dtype(np.float32))


def test_embeddings_come_beside_rows_and_are_told_once(memory: Arenas) -> None:
    with open_harness(FakeRuntime(), memory[0]) as harness:
        first, second = run_tower(memory, 7), run_tower(memory, 8)
        options = RequestOptions(max_tokens=3)
        harness.offer((1, RowRequest(token_ids=[1], prompt_length=1, options=options)))
        harness.work.post(first)
        harness.work.post(second)
        harness.start()
        harness.hear_until("images", 2)
        harness.finish(1)
        assert harness.images == [Encoded(number, ImageTimes(engine_s=0.25)) for number in (7, 8)]
        assert (embedded(memory, first) == 7).all()
        assert (embedded(memory, second) == 8).all()


def test_a_picture_fails_alone(memory: Arenas) -> None:
    with open_harness(FakeRuntime(), memory[0]) as harness:
        harness.work.post(run_tower(memory, 1, level=0))
        gone = run_tower(memory, 2)
        harness.work.post(RunVisionEncoder(2, LAYOUT, gone.patches, GONE))
        harness.work.post(
            RunVisionEncoder(3, ImageLayout(8, 8, (1, 2, 4), 2), gone.patches, gone.target)
        )
        harness.work.post(run_tower(memory, 4))
        harness.start()
        harness.hear_until("images", 4)
        failed = {one.number: one.code for one in harness.images if isinstance(one, EncodeFailed)}
        assert failed == {1: "non_finite", 2: "internal", 3: "internal"}


def test_what_is_given_to_another_meanwhile_is_told_as_failed(memory: Arenas) -> None:
    runtime = FakeRuntime()
    with open_harness(runtime, memory[0]) as harness:
        sent = run_tower(memory, 1)
        runtime.before_step = lambda _: memory[2].free(sent.target)
        harness.work.post(sent)
        harness.start()
        assert harness.hear_until("images").code == "internal"


def test_a_step_that_fails_takes_the_pictures_along(memory: Arenas) -> None:
    runtime = FakeRuntime()

    def fail(step: int) -> None:
        if step == 1:
            runtime.pictures.clear()
            raise HearthError("executor_failed", "as asked")

    runtime.before_step = fail
    with open_harness(runtime, memory[0]) as harness:
        harness.work.post(run_tower(memory, 1))
        harness.work.post(run_tower(memory, 2))
        harness.start()
        harness.hear_until("images", 2)
        told = [(one.number, getattr(one, "code", "")) for one in harness.images]
        assert told == [(1, "executor_failed"), (2, "executor_failed")]
        harness.work.post(run_tower(memory, 3))
        assert harness.hear_until("images", 3) == Encoded(3, ImageTimes(engine_s=0.25))


def test_an_executor_without_a_tower_refuses() -> None:
    with open_harness(FakeRuntime()) as harness:
        harness.work.post(RunVisionEncoder(1, LAYOUT, GONE, GONE))
        harness.start()
        assert harness.hear_until("images").code == "internal"


@pytest.fixture
def adapters_harness(runtime: FakeRuntime) -> Iterator[Harness]:
    with open_harness(runtime) as made:
        for name in ("a", "b"):
            made.control.post(SetAdapter(name, f"/adapters/{name}"))
        yield made


def adapter_row(rid: int, adapter: str, tokens: int = 3) -> tuple[int, RowRequest]:
    options = RequestOptions(max_tokens=tokens, adapter=adapter)
    return rid, RowRequest(token_ids=[1, 2], prompt_length=2, options=options)


def test_adapters_are_loaded_and_it_is_said(
    adapters_harness: Harness, runtime: FakeRuntime
) -> None:
    adapters_harness.start()
    answers = [adapters_harness.adapter_answer() for _ in range(2)]
    assert [(one.adapter, one.code) for one in answers] == [("a", ""), ("b", "")]
    assert {name: str(folder) for name, folder in runtime.adapters.items()} == {
        "a": "/adapters/a",
        "b": "/adapters/b",
    }


def test_one_that_cannot_be_loaded_is_told_with_its_field(adapters_harness: Harness) -> None:
    adapters_harness.control.post(SetAdapter("c", ""))
    adapters_harness.start()
    answers = [adapters_harness.adapter_answer() for _ in range(3)]
    told = answers[-1]
    assert (told.adapter, told.code, told.field) == ("c", "adapter_invalid", "adapter.json")
    adapters_harness.offer(adapter_row(1, "c"))
    assert adapters_harness.hear_until("failed").code == "adapter_unknown"


def test_rows_of_another_adapter_wait_until_none_has_a_place(
    adapters_harness: Harness, runtime: FakeRuntime
) -> None:
    adapters_harness.offer(
        adapter_row(1, "a"),
        adapter_row(2, "b", 2),
        adapter_row(3, "a", 2),
        adapter_row(4, ""),
    )
    adapters_harness.start()
    adapters_harness.finish(1, 2, 3, 4)
    assert adapters_harness.placed == [[1, 3], [2], [4]]
    assert runtime.switches == ["a", "b", ""]
    assert {tuple(rids_of(step)) for step in adapters_harness.steps} == {
        (1, 3),
        (1,),
        (2,),
        (4,),
    }


def test_an_unknown_adapter_fails_its_row_alone(
    adapters_harness: Harness, runtime: FakeRuntime
) -> None:
    adapters_harness.offer(adapter_row(1, "gone"), adapter_row(2, "b"))
    adapters_harness.start()
    adapters_harness.finish(1, 2)
    failed = adapters_harness.failed
    assert [(one.rids, one.code, one.field) for one in failed] == [
        ([1], "adapter_unknown", "adapter")
    ]
    assert runtime.switches == ["b"]


def test_rows_of_an_adapter_that_is_removed_end(
    adapters_harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.before_step = lambda step: (
        adapters_harness.control.post(SetAdapter("a", None)) if step == 2 else None
    )
    adapters_harness.offer(
        adapter_row(1, "a", 10**6),
        adapter_row(2, "b"),
        adapter_row(3, "a"),
    )
    adapters_harness.offer(adapter_row(4, "b", 1), order=1.0)
    adapters_harness.start()
    adapters_harness.hear_until("placed")
    adapters_harness.finish(1, 2, 3, 4)
    failed = adapters_harness.failed
    assert [(one.rids, one.code, one.field) for one in failed] == [
        ([1, 3], "adapter_unknown", "adapter")
    ]
    assert runtime.switches == ["a", "b"]
    assert set(runtime.adapters) == {"b"}
    assert [adapters_harness.adapter_answer().adapter for _ in range(3)] == ["a", "b", "a"]


def test_rows_that_have_no_adapter_go_on_where_one_is_removed(
    adapters_harness: Harness, runtime: FakeRuntime
) -> None:
    runtime.before_step = lambda step: (
        adapters_harness.control.post(SetAdapter("a", None)) if step == 2 else None
    )
    adapters_harness.offer(adapter_row(1, "", 20), adapter_row(2, "a"))
    adapters_harness.start()
    adapters_harness.finish(1, 2)
    assert [one.rids for one in adapters_harness.failed] == [[2]]
    assert len(adapters_harness.tokens()[1]) == 20
