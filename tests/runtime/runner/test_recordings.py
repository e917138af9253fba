from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.graph_cache import GraphCounters
from hearth.runtime.runner.recordings import Recordings


class _Recorded:
    def __init__(self) -> None:
        self.closed = 0

        self.launches: list[Code] = []

    def launch(self, _stream: object) -> None:
        if self.launches:
            raise HearthError(self.launches[-1], "no launch")

    def close(self) -> None:
        self.closed += 1


def recordings_of(record: Callable[[object], _Recorded]) -> tuple[Recordings, GraphCounters]:
    counters = GraphCounters()
    executor = SimpleNamespace(snapshot="step", counters=counters, queue=None)
    bindings = SimpleNamespace(executor=executor, each_set=lambda *_: [None], stream=None)
    given: Any = (SimpleNamespace(backend="kernels"), SimpleNamespace(record=record), bindings)
    return Recordings(*given), counters


def capture(recordings: Recordings) -> None:
    dims: Any = None
    recordings.capture(0, dims, lambda _execute: None)


def test_what_is_captured_again_is_freed() -> None:
    made: list[_Recorded] = []

    def record(_work: object) -> _Recorded:
        made.append(_Recorded())
        return made[-1]

    recordings, _ = recordings_of(record)
    for _ in range(2):
        capture(recordings)
    assert [one.closed for one in made] == [1, 0]
    recordings.close()
    assert [one.closed for one in made] == [1, 1]


@pytest.mark.parametrize("code", ["out_of_memory", "device_lost"])
def test_a_step_that_cannot_be_captured_is_counted_unless_the_device_is_lost(code: Code) -> None:
    def record(_work: object) -> _Recorded:
        raise HearthError(code, "no room for a graph")

    recordings, counters = recordings_of(record)
    with pytest.raises(HearthError) if code == "device_lost" else nullcontext():
        capture(recordings)
    assert counters.failed_captures == (code != "device_lost")
    assert not recordings.launch()


def test_a_launch_that_fails_is_counted_and_leaves_the_step_to_be_run() -> None:
    recorded = _Recorded()
    recordings, counters = recordings_of(lambda _work: recorded)
    capture(recordings)
    assert recordings.launch()
    recorded.launches.append("internal")
    assert not recordings.launch()
    assert (counters.hits, counters.fallbacks) == (1, 1)
    recorded.launches.append("device_lost")
    with pytest.raises(HearthError):
        recordings.launch()
