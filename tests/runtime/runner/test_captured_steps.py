from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.graph_cache import GraphCounters
from hearth.runtime.runner.captured_steps import CapturedSteps


class _CapturedStep:
    def __init__(self) -> None:
        self.closed = 0

        self.launches: list[Code] = []

    def launch(self, _stream: object) -> None:
        if self.launches:
            raise HearthError(self.launches[-1], "no launch")

    def close(self) -> None:
        self.closed += 1


def steps_of(record: Callable[[object], _CapturedStep]) -> tuple[CapturedSteps, GraphCounters]:
    counters = GraphCounters()
    executor = SimpleNamespace(snapshot="step", counters=counters, queue=None)
    bindings = SimpleNamespace(executor=executor, each_set=lambda *_: [None], stream=None)
    given: Any = (SimpleNamespace(backend="kernels"), SimpleNamespace(record=record), bindings)
    return CapturedSteps(*given), counters


def capture(steps: CapturedSteps) -> None:
    dims: Any = None
    steps.capture(0, dims, lambda _execute: None)


def test_what_is_captured_again_is_freed() -> None:
    made: list[_CapturedStep] = []

    def record(_work: object) -> _CapturedStep:
        made.append(_CapturedStep())
        return made[-1]

    steps, _ = steps_of(record)
    for _ in range(2):
        capture(steps)
    assert [one.closed for one in made] == [1, 0]
    steps.close()
    assert [one.closed for one in made] == [1, 1]


@pytest.mark.parametrize("code", ["out_of_memory", "device_lost"])
def test_a_step_that_cannot_be_captured_is_counted_unless_the_device_is_lost(code: Code) -> None:
    def record(_work: object) -> _CapturedStep:
        raise HearthError(code, "no room for a graph")

    steps, counters = steps_of(record)
    with pytest.raises(HearthError) if code == "device_lost" else nullcontext():
        capture(steps)
    assert counters.failed_captures == (code != "device_lost")
    assert not steps.launch()


def test_a_launch_that_fails_is_counted_and_leaves_the_step_to_be_run() -> None:
    captured = _CapturedStep()
    steps, counters = steps_of(lambda _work: captured)
    capture(steps)
    assert steps.launch()
    captured.launches.append("internal")
    assert not steps.launch()
    assert (counters.hits, counters.fallbacks) == (1, 1)
    captured.launches.append("device_lost")
    with pytest.raises(HearthError):
        steps.launch()
