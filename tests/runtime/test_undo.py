from collections.abc import Callable

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.undo import undoing


def take_and_fail(error: Exception, *callbacks: Callable[[], None]) -> None:
    with undoing() as undo:
        for callback in callbacks:
            undo.callback(callback)
        raise error


def test_what_was_taken_is_given_back_in_reverse_when_the_block_fails() -> None:
    given: list[int] = []
    with pytest.raises(ValueError, match="mine"):
        take_and_fail(ValueError("mine"), lambda: given.append(1), lambda: given.append(2))
    assert given == [2, 1]


def test_a_block_that_ends_keeps_everything() -> None:
    given: list[int] = []
    with undoing() as undo:
        undo.callback(given.append, 1)
    assert given == []
    undo.close()
    assert given == [1]


def test_the_first_error_is_the_one_that_is_raised() -> None:
    given: list[int] = []

    def fail() -> None:
        raise HearthError("device_lost", "later")

    with pytest.raises(HearthError, match="first"):
        take_and_fail(HearthError("out_of_memory", "first"), lambda: given.append(1), fail)
    assert given == [1]
