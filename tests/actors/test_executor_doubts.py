"""Rows that end with numbers that are not finite, and what the executor makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from msgspec import structs

from hearth.actors.executor.actor import DOUBT_S, Doubts
from hearth.runtime.errors import HearthError
from tests.actors.executor_house import open_house
from tests.actors.fake_runtime import FakeRuntime
from tests.actors.test_executor import row

WELL, ILL = True, False


@pytest.mark.parametrize(
    ("ends", "due"),
    [
        ([], False),
        ([(1, ILL)], False),
        ([(1, ILL), (1, ILL), (1, ILL)], False),
        ([(1, ILL), (2, ILL)], True),
        ([(1, ILL), (3, WELL), (2, ILL)], False),
        ([(1, ILL), (2, ILL), (3, WELL)], False),
        ([(1, ILL), (3, WELL), (2, ILL), (1, ILL)], True),
    ],
)
def test_two_prompts_without_a_good_end_between_are_enough(
    ends: list[tuple[int, bool]], *, due: bool
) -> None:
    doubts = Doubts()
    for place, end in enumerate(ends):
        doubts.ended([end], float(place))
    assert doubts.due(float(len(ends))) == due


def test_an_engine_that_was_asked_is_not_asked_again_for_a_while() -> None:
    doubts = Doubts()
    doubts.ended([(1, ILL), (2, ILL)], 0.0)
    doubts.settled(1.0)
    doubts.ended([(1, ILL), (2, ILL)], 2.0)
    assert not doubts.due(2.0)
    doubts.ended([(1, ILL), (2, ILL)], 62.0)
    assert doubts.due(62.0)


def test_rows_that_run_on_are_not_kept_waiting_for() -> None:
    doubts = Doubts()
    doubts.ended([(1, ILL), (2, ILL)], 0.0)
    assert doubts.due(DOUBT_S)
    assert not doubts.due(DOUBT_S + 0.1)


@pytest.mark.parametrize("right", [True, False])
def test_the_known_answer_is_asked_again_and_a_wrong_one_ends_the_executor(*, right: bool) -> None:
    runtime, asked = FakeRuntime(places=1), list[int]()
    runtime.poisoned = {66, 67}

    def ask() -> None:
        asked.append(len(runtime.rows))
        if not right:
            raise HearthError("wrong_answer", "the engine does not compute its model")

    with structlog.testing.capture_logs(), open_house(runtime, ask=ask) as house:
        house.offer(row(1, first=66), row(2, first=67), row(3))
        house.start()
        if right:
            house.finish(3)
        else:
            house.join()
            while house.hear(0.1) is not None:
                pass
            assert house.placed == [[1], [2]]
    # No row runs then.
    assert asked == [0]
    assert [error.code for error in house.failures if isinstance(error, HearthError)] == (
        [] if right else ["wrong_answer"]
    )


def test_rows_with_an_adapter_say_nothing_of_the_engine() -> None:
    runtime, asked = FakeRuntime(places=1), list[int]()
    runtime.poisoned = {66, 67}
    runtime.adapters = {"spoken": Path("spoken")}
    with (
        structlog.testing.capture_logs(),
        open_house(runtime, ask=lambda: asked.append(1)) as house,
    ):
        for rid, one in (row(1, first=66), row(2, first=67)):
            options = structs.replace(one.options, adapter="spoken")
            house.offer((rid, structs.replace(one, options=options)))
        house.offer(row(3))
        house.start()
        house.finish(3)
    assert asked == []
