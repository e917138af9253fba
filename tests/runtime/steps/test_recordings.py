from types import SimpleNamespace
from typing import Any

from runtime.steps.recordings import Recordings


class _Recorded:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_what_is_captured_again_is_freed() -> None:
    made: list[_Recorded] = []

    def record(_work: object) -> _Recorded:
        made.append(_Recorded())
        return made[-1]

    counters = SimpleNamespace(captures=0)
    executor = SimpleNamespace(snapshot="step", counters=counters, queue=None)
    bindings = SimpleNamespace(executor=executor, each_set=lambda *_: [None])
    given: Any = (SimpleNamespace(backend="kernels"), SimpleNamespace(record=record), bindings)
    recordings = Recordings(*given)
    dims: Any = None
    for _ in range(2):
        recordings.capture(0, dims, lambda _execute: None)
    assert [one.closed for one in made] == [1, 0]
    recordings.close()
    assert [one.closed for one in made] == [1, 1]
