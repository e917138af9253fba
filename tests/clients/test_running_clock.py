import pytest

from hearth_client.running_clock import RunningClock


class Source:
    """A steady clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("gap", [0.0, 0.25, 0.5])
def test_time_that_is_read_often_counts(gap: float) -> None:
    source = Source()
    clock = RunningClock(0.5, source)
    for _ in range(8):
        source.seconds += gap
        clock.now()
    assert clock.now() == 8 * gap


def test_standing_still_counts_for_little() -> None:
    source = Source()
    clock = RunningClock(0.5, source)
    source.seconds += 0.25
    clock.now()
    source.seconds += 3600
    assert clock.now() == 0.75
    source.seconds += 0.25
    assert clock.now() == 1.0


def test_it_follows_the_steady_clock() -> None:
    clock = RunningClock(60.0)
    first = clock.now()
    assert first >= 0
    assert clock.now() >= first
