from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.device.cuda import programs as cuda_programs
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.launch import Launch
from hearth.runtime.device.cuda.programs import WantedKernels
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.engine_executor import EngineExecutor, check_bindings, check_known
from hearth.runtime.executor.kernels.attention import Attention
from hearth.runtime.executor.kernels.engine import (
    KernelsEngine,
    io_tensors_of,
    step_shapes,
    wanted_kernels,
)
from hearth.runtime.executor.kernels.step import DecoderStep
from hearth.runtime.tensors.profiles import InferenceDims, build_profiles, prefill_widths
from hearth.runtime.weights.weights_file import write_layout
from tests.runtime.device.cuda.resource_driver import ResourceDriver
from tests.runtime.device.cuda.test_tree_launches import NoCompiler
from tests.runtime.executor.kernels.kernel_engines import (
    FACTS,
    bindings_of,
    kernels_config,
    layout_of,
    registry_of,
)

CONFIG = kernels_config()
UINT8 = np.dtype(np.uint8)


@pytest.fixture
def api() -> ResourceDriver:
    return ResourceDriver()


@pytest.fixture
def device(api: ResourceDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    monkeypatch.setattr(cuda_programs, "kernel_source", lambda *_: "")
    compiler: Any = NoCompiler()
    made = CudaDevice(CudaContext(CudaDriver(api)), compiler)
    yield made
    made.close()
    assert not api.misuse


class Opened:
    """An engine over a driver that does nothing."""

    def __init__(self, device: CudaDevice, folder: Path, **changes: Any) -> None:
        self.config = structs.replace(CONFIG, **changes)
        layout = layout_of(self.config)
        write_layout(folder, layout)
        self.registry = registry_of(self.config, layout)
        self.engine = KernelsEngine.open(folder, self.config, device, self.registry, facts=FACTS)
        self.use_scratch(device)

    def use_scratch(self, device: CudaDevice) -> None:
        size = self.engine.required_context_memory
        self.engine.set_context_memory(device.zeros("scratch", (size,), UINT8))

    def bindings(self, dims: InferenceDims) -> tuple[Binding, ...]:
        return bindings_of(self.engine.io_tensors, self.registry, dims)


def test_its_bindings_are_those_of_the_registry(device: CudaDevice, tmp_path: Path) -> None:
    opened = Opened(device, tmp_path)
    io = opened.engine.io_tensors
    check_bindings(io, opened.registry)
    check_known(io, opened.registry)
    directions = [one.direction for one in io]
    assert directions == sorted(directions)
    assert {one.name: one.shape for one in io}["rope_cos"] == (None, 8)
    EngineExecutor(opened.engine, opened.registry, build_profiles(CONFIG))
    opened.engine.close()


def test_a_step_that_comes_again_is_not_built_again(
    device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(device, tmp_path)
    built = []
    launches = opened.engine._step.launches

    def build(bindings: Sequence[Binding]) -> list[Launch]:
        built.append(bindings)
        return launches(bindings)

    monkeypatch.setattr(opened.engine._step, "launches", build)
    steps = [opened.bindings(InferenceDims.decode(batch, 64)) for batch in (1, 2)]
    for index in (0, 0, 1, 0, 1):
        opened.engine.run(steps[index], device.stream)
    assert built == steps
    # An equal tuple may be of another map.
    opened.engine.run(opened.bindings(InferenceDims.decode(1, 64)), device.stream)
    assert len(built) == 3
    opened.use_scratch(device)
    opened.engine.run(steps[0], device.stream)
    assert len(built) == 4
    opened.engine.close()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_kernels_of_every_step_are_wanted_ahead(rows: int) -> None:
    config = structs.replace(CONFIG, prefill_chunk=64, hidden_size=1024)
    layout = layout_of(config)
    registry = registry_of(config, layout)
    ahead = set(wanted_kernels(config, layout, registry, FACTS))
    later = WantedKernels()
    io_tensors = io_tensors_of(config, registry)
    step = DecoderStep(config, layout, io_tensors, later, FACTS)
    step.provide(step_shapes(config, FACTS))
    for tokens in (1, *prefill_widths(config)):
        step.launches(bindings_of(io_tensors, registry, InferenceDims.prefill(rows, tokens, 64)))
    assert set(later.requests) <= ahead


@pytest.mark.parametrize(("heads", "shared"), [(2, 1), (16, 8), (7, 1), (12, 12), (24, 4)])
@pytest.mark.parametrize("multiprocessors", [8, 46, 132])
def test_no_step_needs_more_than_was_provided_for(
    heads: int, shared: int, multiprocessors: int
) -> None:
    config = structs.replace(
        CONFIG,
        num_attention_heads=heads,
        num_kv_heads=shared,
        max_supported_batch_size=7,
        prefill_chunk=90,
        max_kv_cache_capacity=2048,
    )
    facts = FACTS._replace(multiprocessors=multiprocessors)
    shapes = set(step_shapes(config, facts))
    attention = Attention(WantedKernels(), facts, config, eps=1e-6, qk_norm=True)
    for needed in (attention.scratch_bytes, attention.ticket_bytes):
        every = (needed(*sizes, 2048) for sizes in product(range(1, 8), range(1, 91)))
        assert max(every) == max(needed(*shape[:3]) for shape in shapes)
    assert max(shape.tokens for shape in shapes) == 7 * 90


def test_kept_steps_are_the_newest(device: CudaDevice, tmp_path: Path) -> None:
    opened = Opened(device, tmp_path)
    for _ in range(130):
        opened.engine.run(opened.bindings(InferenceDims.decode(1, 64)), device.stream)
    assert len(opened.engine._packed) == 128
    opened.engine.close()


def test_a_capture_runs_the_step_once_before(
    api: ResourceDriver, device: CudaDevice, tmp_path: Path
) -> None:
    opened = Opened(device, tmp_path)
    api.calls.clear()
    names: list[str] = []
    call = api._call

    def note(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        names.append(name)
        return call(name, arguments)

    api._call = note  # type: ignore[method-assign] # it is noted
    graph = opened.engine.capture(opened.bindings(InferenceDims.decode(1, 64)), device.stream)
    launches = names.count("cuLaunchKernelEx") // 2
    assert names[:launches] == ["cuLaunchKernelEx"] * launches
    assert names[launches : launches + 2] == ["cuStreamSynchronize", "cuStreamBeginCapture"]
    graph.close()
    opened.engine.close()


@pytest.mark.parametrize("field", ["external_weight_files", "head_dim"])
def test_weights_that_kernels_do_not_serve_are_refused_by_name(
    device: CudaDevice, tmp_path: Path, field: str
) -> None:
    layout = layout_of(CONFIG)
    read_by_a_graph = structs.replace(layout, bound=False)
    other_heads = structs.replace(layout, model=structs.replace(layout.model, head_dim=8))
    wrong = {"external_weight_files": read_by_a_graph, "head_dim": other_heads}[field]
    write_layout(tmp_path, wrong)
    with pytest.raises(HearthError, match="which kernels do not serve") as caught:
        KernelsEngine.open(tmp_path, CONFIG, device, registry_of(CONFIG, layout), facts=FACTS)
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", field)


def test_a_gpu_before_ampere_is_refused(device: CudaDevice, tmp_path: Path) -> None:
    layout = layout_of(CONFIG)
    write_layout(tmp_path, layout)
    facts = FACTS._replace(capability=(7, 5))
    with pytest.raises(HearthError, match=r"compute capability 7\.5"):
        KernelsEngine.open(tmp_path, CONFIG, device, registry_of(CONFIG, layout), facts=facts)
