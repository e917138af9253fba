import numpy as np

from hearth.runtime.export.progress import Meter


def test_the_meter_begins_at_nothing_and_never_exceeds_the_total() -> None:
    heard: list[tuple[str, int, int]] = []
    meter = Meter(lambda *step: heard.append(step), "weights", 10)
    meter.add(4)
    meter.add(9)
    assert heard == [("weights", 0, 10), ("weights", 4, 10), ("weights", 10, 10)]


def test_pieces_are_counted_when_they_have_been_taken() -> None:
    heard: list[int] = []
    meter = Meter(lambda _stage, done, _total: heard.append(done), "weights", 100)
    pieces = meter.over([np.zeros(5, np.uint8), np.zeros(7, np.uint8)])
    next(pieces)
    assert heard == [0]
    next(pieces)
    assert heard == [0, 5]
    meter.finish()
    assert heard == [0, 5, 100]


def test_nobody_needs_to_listen() -> None:
    Meter(None, "weights", 1).finish()
