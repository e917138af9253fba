"""A device of steps of `step_s`, and a host that queues one in `host_s` as late as it may."""

import pytest

from hearth.runtime.generation.step_times import QueueTime


def step_times(
    step_s: list[float], host_s: float, *, stalls: dict[int, float] | None = None
) -> list[float]:
    """Seconds from the end of each step to that of the next, where a place is always free."""
    queueing = QueueTime()
    collected, running_ends, found = 0.0, step_s[0], list[float]()
    for number, next_s in enumerate(step_s):
        queued = collected + queueing.behind(host_s) + host_s
        next_ends = max(running_ends, queued) + next_s
        looked = max(running_ends, queued) + (stalls or {}).get(number, 0.0)
        queueing.record(looked - collected)
        found.append(looked - collected)
        collected, running_ends = looked, next_ends
    return found


@pytest.mark.parametrize("host_s", [0.0001, 0.001, 0.003])
def test_a_steady_device_never_waits_for_long(host_s: float) -> None:
    assert max(step_times([0.004] * 500, host_s)[1:]) < 0.0041


@pytest.mark.parametrize("number", [32, 33, 40])
def test_a_stall_is_forgotten_at_once(number: int) -> None:
    found = step_times([0.004] * 200, 0.0001, stalls={number: 10.0})
    assert sum(one > 0.0041 for one in found) == 1


def test_steps_that_become_shorter_are_soon_waited_for_no_longer_than_they_take() -> None:
    found = step_times([0.012] * 100 + [0.004] * 100, 0.0001)
    assert sum(one > 0.0041 for one in found[100:]) < 20


def test_the_next_step_is_queued_shortly_before_the_end() -> None:
    queueing = QueueTime()
    assert queueing.behind(0.0001) == 0.0
    queueing.record(0.004)
    assert queueing.behind(0.0001) == pytest.approx(0.0035)
    assert queueing.behind(0.001) == pytest.approx(0.002)
    assert queueing.behind(0.003) == 0.0
