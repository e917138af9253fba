from pathlib import Path

import pytest

from daemon.bench.actor_step import actor_step_s


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_through_a_daemon_take_some_time(toy: Path, batch: int) -> None:
    assert 0 < actor_step_s(toy, batch, tokens=48) < 0.1
