import pytest

from hearth.actors.scheduler.lookahead import BatchingDelay
from hearth.actors.settings import PolicySettings, Reloadable

WAIT, HOLD = 0.005, 2.0


def batching_delay(wait_s: float = WAIT) -> BatchingDelay:
    return BatchingDelay(Reloadable(PolicySettings(fill_wait_ms=1000 * wait_s, hold_s=HOLD)))


def live(wait: BatchingDelay, windows: int, *, rows: int = 1, seconds: float = 0.5) -> None:
    """So many batches that begin with `rows` rows, and nobody comes after."""
    for number in range(windows):
        wait.started(float(number), rows)
        wait.ended(seconds)


def test_others_are_expected_at_first() -> None:
    assert batching_delay().wait_s == WAIT


def test_who_is_always_alone_waits_no_longer() -> None:
    wait = batching_delay()
    live(wait, 100)
    assert wait.wait_s == WAIT
    live(wait, 100)
    assert wait.wait_s == 0


def test_batches_of_several_rows_are_worth_a_wait() -> None:
    wait = batching_delay()
    live(wait, 1000, rows=2)
    assert wait.wait_s == WAIT


@pytest.mark.parametrize(("late_s", "waits"), [(0.004, WAIT), (0.006, 0)])
def test_who_comes_in_the_window_counts_also_when_nobody_waited(
    late_s: float, waits: float
) -> None:
    wait = batching_delay()
    live(wait, 300)
    assert wait.wait_s == 0
    for number in range(3):
        opened = 1000.0 + number
        wait.started(opened, 1)
        wait.arrived(opened + late_s)
        wait.ended(0.5)
    assert wait.wait_s == waits


def test_a_window_counts_once_however_many_come() -> None:
    crowd, pair = batching_delay(), batching_delay()
    for wait, many in ((crowd, 9), (pair, 1)):
        live(wait, 300)
        wait.started(1000.0, 1)
        for _ in range(many):
            wait.arrived(1000.001)
    assert crowd._share == pair._share


def test_the_shorter_the_batches_the_less_there_is_to_miss() -> None:
    short, long = batching_delay(), batching_delay()
    live(short, 150, seconds=0.05)
    live(long, 150, seconds=1.0)
    assert (short.wait_s, long.wait_s) == (0, WAIT)


def test_a_batch_that_is_held_up_costs_others_no_more_than_the_limit() -> None:
    wait = batching_delay()
    live(wait, 10, seconds=1000.0)
    assert wait._batch_s == HOLD


def test_without_a_wait_there_is_none() -> None:
    assert batching_delay(0.0).wait_s == 0
