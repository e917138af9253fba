from pathlib import Path

import pytest
from hearth_client.protocol import Delta

from daemon.bench.actor_step import actor_step_s, step_times


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_through_a_daemon_take_some_time(toy: Path, batch: int) -> None:
    assert 0 < actor_step_s(toy, batch, tokens=48) < 0.1


def test_a_delta_of_several_tokens_tells_nothing_of_a_step() -> None:
    row = [
        Delta("1", 0, "a", [5], ended=1.0),
        Delta("1", 1, "b", [6], ended=1.25),
        Delta("1", 2, "cd", [7, 8], ended=1.75),
        Delta("1", 3, "e", [9], ended=2.125),
    ]
    assert step_times(row) == [0.25, 0.375]
