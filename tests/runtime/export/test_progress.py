import numpy as np

from hearth.runtime.export.progress import ProgressCounter


def test_the_meter_begins_at_nothing_and_never_exceeds_the_total() -> None:
    heard: list[tuple[str, int, int]] = []
    counter = ProgressCounter(lambda *step: heard.append(step), "weights", 10)
    counter.add(4)
    counter.add(9)
    assert heard == [("weights", 0, 10), ("weights", 4, 10), ("weights", 10, 10)]


def test_pieces_are_counted_when_they_have_been_taken() -> None:
    heard: list[int] = []
    counter = ProgressCounter(lambda _stage, done, _total: heard.append(done), "weights", 100)
    pieces = counter.over([np.zeros(5, np.uint8), np.zeros(7, np.uint8)])
    next(pieces)
    assert heard == [0]
    next(pieces)
    assert heard == [0, 5]
    counter.finish()
    assert heard == [0, 5, 100]


def test_nobody_needs_to_listen() -> None:
    ProgressCounter(None, "weights", 1).finish()
