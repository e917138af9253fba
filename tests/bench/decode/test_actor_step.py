from pathlib import Path

import pytest

from bench.decode.actor_step import actor_step_s, step_times


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_through_a_daemon_take_some_time(toy: Path, batch: int) -> None:
    assert actor_step_s(toy, batch, tokens=48) > 0


def test_a_delta_of_several_tokens_tells_nothing_of_a_step() -> None:
    assert step_times([(1.0, 1), (1.25, 1), (1.75, 2), (2.125, 1)]) == [0.25, 0.375]
