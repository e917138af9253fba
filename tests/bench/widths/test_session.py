from pathlib import Path

import pytest

from bench.widths.session import Amounts, parents, width_times
from runtime.device.stream import Stream
from runtime.executor.engine_executor import EngineExecutor
from runtime.steps.recordings import Recordings


def test_a_node_follows_its_parent_and_each_has_four_children() -> None:
    assert parents(8) == [-1, 0, 0, 0, 0, 1, 1, 1]
    assert parents(1) == [-1]


@pytest.mark.slow
def test_an_engine_is_timed_in_all_widths(toy: Path) -> None:
    amounts = Amounts(trees=(2, 5), prompt=128, windows=1, launches=2)
    times = width_times(toy, amounts)
    assert set(times.tree_ms) == {2, 5}
    assert min(times.step_ms, times.prompt_ms, *times.tree_ms.values()) > 0
    assert (times.prompt, times.context) == (128, 128)


@pytest.mark.slow
def test_what_is_timed_was_captured(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[bool] = []
    execute = EngineExecutor.execute

    def counted(self: EngineExecutor, stream: Stream) -> bool:
        captured.append(execute(self, stream))
        return captured[-1]

    monkeypatch.setattr(EngineExecutor, "execute", counted)
    # What kernels record around a step is none of the executor's graphs.
    monkeypatch.setattr(Recordings, "capture", lambda *_: None)
    amounts = Amounts(trees=(2, 5), prompt=128, windows=1, launches=2)
    width_times(toy, amounts)
    warm_up_and_window = 4
    assert sum(captured) >= warm_up_and_window * 2 * amounts.launches * 2
