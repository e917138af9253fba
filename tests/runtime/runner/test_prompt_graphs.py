"""Chunks of prompts from captured steps, against the same chunks without: on the CPU and a GPU."""

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.config import load_config
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.errors import Code, HearthError
from hearth.runtime.executor.engine import EngineOptions, GraphCounters
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.assembly import assemble
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.runner.bindings import CapturedSteps
from hearth.runtime.runner.engine_runner import LLMEngineRunner, PromptGraphs
from hearth.runtime.tensors.profiles import captured_widths
from hearth.runtime.tensors.tensor import Tensor
from tests.references import reference_folder
from tests.runtime.arrangements import open_runner
from tests.runtime.conftest import EngineFolders

WIDTHS = (32, 256)
PLACES = (0, 3)
CAPACITY, PADDING = 512, 20
MIB = 1 << 20
Read = Callable[[Tensor], NDArray[Any]]
SIMULATED = simulated_config(layers=1, max_batch=3, prefill_chunk=48)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give any engine the prompt graphs of one of kernels."""
    monkeypatch.setattr(
        "hearth.runtime.tensors.profiles.captured_widths",
        lambda config: captured_widths(structs.replace(config, backend="kernels")),
    )


def _simulated() -> LLMEngineRunner:
    return open_runner(Path(), SIMULATED, CpuDevice())


def _chunk(runner: LLMEngineRunner, width: int, first: int, seed: int) -> None:
    """A chunk of one row with padding: that of three chunks stays within the capacity."""
    ids = np.random.default_rng(seed).integers(3, 280, (1, width))
    runner.execute_prefill_step(ids, [width - PADDING], first)


def _life(runner: LLMEngineRunner, width: int, place: int, read: Read) -> list[NDArray[Any]]:
    """Logits and cache of a row with two chunks at `place`, and of a third where it moved to 0."""
    runner.reset(place + 1)
    found = []
    caches = runner.get_kv_cache()
    # Where it comes from, and the row before, have something in their slots.
    for row in range(place + 1):
        runner.execute_prefill_step(np.full((1, 5), 7 + row), [5], row)
    for seed in range(2):
        _chunk(runner, width, place, seed)
        found.append(read(runner._logits)[0])
    used = caches.row_lengths[place]
    found += caches.capture(place, used).attention
    caches.reorder(BatchReorder(1, [RowMove(place, 0, used)] if place else []))
    _chunk(runner, WIDTHS[0], 0, 2)
    return [
        *found,
        read(runner._logits)[0],
        *caches.capture(0, used + WIDTHS[0] - PADDING).attention,
    ]


def _assert_captured_chunks_are_the_same(
    runner: LLMEngineRunner, read: Read, tolerance: float
) -> None:
    cases = [(width, place) for width in WIDTHS for place in PLACES]
    plain = [_life(runner, *case, read) for case in cases]
    before = structs.replace(runner.prompt_graphs)
    assert before.hits == 0
    runner.capture_prefill_graphs()
    assert runner.executor.counters.failed_captures == 0, runner.executor.counters.failure
    assert runner.prompt_graphs.captures == 4 * 4
    for case, wanted in zip(cases, plain, strict=True):
        for one, other in zip(_life(runner, *case, read), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)
    # The chunks of five tokens have no graph.
    assert runner.prompt_graphs.hits == 3 * len(cases)
    assert runner.prompt_graphs.misses - before.misses == 2 * sum(PLACES) + 2 * len(PLACES)
    assert runner.executor.counters.fallbacks == 0


@pytest.mark.usefixtures("captured")
def test_captured_chunks_on_the_cpu_are_those_of_ordinary_runs(
    engine_folders: EngineFolders, dialect: str
) -> None:
    folder = engine_folders("qwen3", dialect)
    config = structs.replace(load_config(folder), max_supported_batch_size=4, prefill_chunk=256)
    with closing(open_runner(folder, config, CpuDevice())) as runner:
        runner.get_kv_cache().kv.buckets = (CAPACITY,)
        _assert_captured_chunks_are_the_same(runner, lambda tensor: tensor.array.copy(), 1e-5)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_captured_chunks_of_kernels_have_the_bits_of_ordinary_runs(
    gpu: CudaDevice, tmp_path: Path
) -> None:
    options = ExportOptions(device="cuda", dtype="float16", capacity=CAPACITY, max_batch=4)
    config = export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    parts = assemble(DeploymentConfig(config), tmp_path / "engine", EngineOptions(), gpu)
    with closing(parts.runner) as runner:
        _assert_captured_chunks_are_the_same(runner, gpu.read, 0)


def test_only_what_has_widths_is_captured() -> None:
    runner = _simulated()
    runner.capture_prefill_graphs()
    assert runner.prompt_graphs == PromptGraphs()
    assert runner.executor.counters.captures == 0


@pytest.mark.usefixtures("captured")
def test_each_place_has_its_graphs_beside_those_of_decode_steps() -> None:
    runner = _simulated()
    runner.capture_vanilla_decoding_graph([1, 2, 3])
    decodes = runner.executor.counters.captures
    runner.capture_prefill_graphs()
    found = runner.prompt_graphs
    assert (found.captures, found.hits, found.misses) == (3 * 2, 0, 0)
    assert len(runner.executor._graphs) == decodes + 3 * 2
    assert found.seconds > 0
    assert runner.get_kv_cache().batch == 0


def _captured_with(free: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    runner, left = _simulated(), iter(free)
    monkeypatch.setattr(runner._device, "free_memory", lambda: MIB * next(left))
    monkeypatch.setattr(
        "hearth.runtime.runner.engine_runner.prompt_graph_bytes", lambda _: 100 * MIB
    )
    runner.capture_prefill_graphs()
    return runner.prompt_graphs


@pytest.mark.usefixtures("captured")
def test_no_more_is_captured_than_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _captured_with([1000, 960, 920, 880], monkeypatch)
    assert (found.captures, found.bytes) == (3, 120 * MIB)


@pytest.mark.usefixtures("captured")
def test_a_little_memory_is_taken_for_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, left = _simulated(), iter([500, 450, 450, 450, 437, 436, 430])
    monkeypatch.setattr(runner._device, "free_memory", lambda: MIB * next(left))
    runner.capture_prefill_graphs()
    assert (runner.prompt_graphs.captures, runner.prompt_graphs.bytes) == (5, 64 * MIB)


@pytest.mark.usefixtures("captured")
def test_what_captures_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _captured_with([1000, 990, 990, 980, 970, 970, 960], monkeypatch)
    assert (found.captures, found.bytes) == (6, 40 * MIB)


@pytest.mark.usefixtures("captured")
def test_memory_that_the_host_shares_is_asked_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, left = _simulated(), iter([500, 420, 320])
    monkeypatch.setattr(
        "hearth.runtime.runner.engine_runner.available_memory", lambda: MIB * next(left)
    )
    monkeypatch.setattr(
        "hearth.runtime.runner.engine_runner.prompt_graph_bytes", lambda _: 100 * MIB
    )
    runner.capture_prefill_graphs()
    assert (runner.prompt_graphs.captures, runner.prompt_graphs.bytes) == (2, 180 * MIB)


@pytest.mark.usefixtures("captured")
def test_a_chunk_of_several_rows_has_no_graph() -> None:
    runner = _simulated()
    runner.capture_prefill_graphs()
    runner.reset(2)
    runner.execute_prefill_step(np.ones((2, 32), np.int64), [32, 30])
    runner.reset(2)
    runner.execute_prefill_step(np.ones((1, 32), np.int64), [32], 1)
    assert (runner.prompt_graphs.hits, runner.prompt_graphs.misses) == (1, 1)


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
