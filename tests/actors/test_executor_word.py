from __future__ import annotations

from hearth.actors.executor_word import ExecutorWord
from hearth.actors.messages import (
    Continuation,
    ExecutorGone,
    RowsEnded,
    RowsFailed,
    RowsPlaced,
    RowsReturned,
    Step,
)
from hearth.runtime.request import RowToken


def step(incarnation: int, *ends: bool) -> Step:
    tokens = [RowToken(0, 5, finish="stop" if end else None) for end in ends]
    return Step(incarnation, list(range(1, len(ends) + 1)), tokens, 0.5)


def test_of_a_step_the_scheduler_hears_who_has_ended_alone() -> None:
    word = ExecutorWord()
    assert word.passes_on(step(1, False, False)) is None
    assert word.passes_on(step(1, False, True)) == RowsEnded(1, [2])
    failed = Step(1, [9], [RowToken(0, -1, error="non_finite")], 0.5)
    assert word.passes_on(failed) == RowsEnded(1, [9])


def test_the_scheduler_hears_whose_prompt_has_been_read() -> None:
    word = ExecutorWord()
    first = Step(1, [1, 2], [RowToken(0, 5), RowToken(0, 5, finish="stop")], 0.5, {1: 0.1, 2: 0.1})
    assert word.passes_on(first) == RowsEnded(1, [2], begun=[1])


def test_what_the_scheduler_has_said_itself_is_not_told_again() -> None:
    word = ExecutorWord()
    assert word.passes_on(RowsFailed(0, [1], "queue_full", "full")) is None
    for told in (
        RowsPlaced(1, [1]),
        RowsFailed(1, [1], "out_of_memory", "no room"),
        RowsEnded(1, [2]),
        RowsReturned(1, [Continuation(3, [4])], [5]),
    ):
        assert word.passes_on(told) == told


def test_offered_rows_of_a_dead_executor_have_begun_or_they_have_not() -> None:
    word = ExecutorWord()
    word.passes_on(RowsPlaced(2, [1, 2, 3, 4, 5]))
    word.passes_on(step(2, True))
    word.passes_on(RowsEnded(2, [2]))
    word.passes_on(RowsFailed(2, [3], "non_finite", "no number"))
    word.passes_on(RowsReturned(2, [Continuation(4, [])]))
    assert word.bury(ExecutorGone(2, [1, 5, 6], "it died")) == [
        RowsFailed(2, [5], "executor_failed", "it died"),
        RowsReturned(2, unplaced=[1, 6]),
    ]
    assert word.bury(ExecutorGone(3, [], "it died")) == []


def test_a_dead_executor_is_heard_no_more_and_the_next_one_is() -> None:
    word = ExecutorWord()
    assert word.heeds(step(1, False))
    word.bury(ExecutorGone(2, [], "it died"))
    assert [word.heeds(step(number, False)) for number in (1, 2, 3)] == [False, False, True]
    assert word.heeds(RowsFailed(0, [1], "queue_full", "of the scheduler"))
