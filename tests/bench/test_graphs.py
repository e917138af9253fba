from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.graphs import GraphRun
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import RuntimeOptions
from tests.bench.running import run


@pytest.fixture
def runtime(toy: Path) -> Iterator[LLMInferenceRuntime]:
    opened = LLMInferenceRuntime.open(toy, RuntimeOptions(threads=1, max_batch=3, capacity=256))
    yield opened
    opened.close()


def test_decode_steps_come_from_graphs_whatever_happens(runtime: LLMInferenceRuntime) -> None:
    seen: list[tuple[int, int]] = []
    found = GraphRun(runtime, (1, 2, 3)).run(6, lambda *progress: seen.append(progress))
    assert seen[-1] == (6, 6)
    assert found.decode_steps == found.hits > 100
    assert found.hit_rate == 1
    assert found.prefill_steps == 6
    assert found.evictions > 0
    assert found.cancels > 0
    assert found.padded == 0
    assert set(found.batch_sizes) <= {1, 2, 3}


def test_steps_without_a_graph_are_counted(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "capture", lambda _: None)
    found = GraphRun(runtime, (1, 3)).run(4, lambda *_: None)
    assert (found.hits, found.hit_rate) == (0, 0)
    assert found.misses == found.decode_steps > 0
    assert (found.padded > 0) == (2 in found.batch_sizes)


def test_the_same_seed_gives_the_same_run(runtime: LLMInferenceRuntime) -> None:
    first, second = (GraphRun(runtime, (1, 2, 3), seed=7).run(2, lambda *_: None) for _ in "ab")
    assert (first.decode_steps, first.cancels) == (second.decode_steps, second.cancels)


def test_the_command_judges(toy: Path) -> None:
    code, figures = run("graphs", "--batches", "2", "--engine", str(toy))
    assert (code, figures["hit_rate"], figures["batches"]) == (0, 1, 2)
