"""Launches, and every call of the driver failing in turn, from opening a runtime to closing it."""

import ctypes
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import RowMove
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda import cuda_device
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice, RotaryArguments
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.element_types import copy_unit, float_type, index_type
from hearth.runtime.device.cuda.graph import GraphCapture
from hearth.runtime.device.cuda.launch import KernelLaunch, Launch, Launcher, pack_arguments
from hearth.runtime.device.cuda.ops import FeedArguments, LengthsArguments
from hearth.runtime.device.cuda.sample_ring import RESULT
from hearth.runtime.device.cuda.sampler import CAPTURED_SLOTS, BatchArguments
from hearth.runtime.device.cuda.storage import (
    MOVES,
    Moves,
    PathArguments,
    RowsArguments,
    queue_moves,
)
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.device.cuda.tree_ops import FinishArguments, NodesArguments, ProposalArguments
from hearth.runtime.device.cuda.walks import WalkArguments
from hearth.runtime.device.cuda.wide_draws import (
    ROW,
    SPOTS,
    WORK_BYTES,
    WideArguments,
    is_greedy,
    row_settings,
)
from hearth.runtime.device.device import Device, Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor import engine_executor
from hearth.runtime.executor.engine import Binding, CapturedRun, EngineOptions, IOTensor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.registry import TensorRegistry
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver
from tests.runtime.device.cuda.resource_driver import ResourceDriver
from tests.runtime.device.cuda.test_tree_launches import NoCompiler


def launch_of(api: FakeDriver, *arguments: Any) -> KernelLaunch:
    context = CudaContext(CudaDriver(api))
    return KernelLaunch(context, CudaStream(context), "kernel", 128, arguments)


def test_arguments_are_packed_once_and_read_when_launched() -> None:
    number, address = ctypes.c_int32(5), ctypes.c_uint64(1 << 40)
    pointers = pack_arguments((number, address))
    number.value = 6
    assert ctypes.c_int32.from_address(pointers[0] or 0).value == 6
    assert ctypes.c_uint64.from_address(pointers[1] or 0).value == 1 << 40


def test_a_launch_is_one_call_and_its_failure_is_named() -> None:
    api = FakeDriver()
    launch = launch_of(api, ctypes.c_int32(1))
    launch.launch(3, 2)
    name, *arguments = api.calls[-1]
    assert name == "cuLaunchKernel"
    assert arguments[:9] == ["kernel", 3, 2, 1, 128, 1, 1, 0, 17]
    api.failing["cuLaunchKernel"] = CUresult.CUDA_ERROR_INVALID_VALUE
    launch = launch_of(api, ctypes.c_int32(1))
    with pytest.raises(HearthError, match="cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE"):
        launch.launch(1)


@pytest.mark.parametrize(
    ("version", "call"), [(12020, "cuLaunchKernel"), (12030, "cuLaunchKernelEx")]
)
def test_a_launch_is_early_where_the_driver_captures_that(version: int, call: str) -> None:
    api = FakeDriver()
    api.results["cuDriverGetVersion"] = (version,)
    launch_of(api, ctypes.c_int32(1)).launch_dependent(3)
    assert api.calls[-1][0] == call


class Arguments(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("count", ctypes.c_int32))


def launch_named(name: str, grid: tuple[int, int, int], shared_bytes: int = 0) -> Launch:
    return Launch(f"function {name}", grid, 256, shared_bytes, Arguments(1 << 40, 7), name)


def test_a_driver_that_captures_no_early_launches_gets_none() -> None:
    api = FakeDriver()
    api.results["cuDriverGetVersion"] = (12020,)
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=True).pack([launch_named("only", (1, 1, 1))])
    api.calls.clear()
    step.queue(CudaStream(context))
    config = api.calls[-1][1]
    assert not hasattr(config, "attrs")


def test_a_step_is_one_call_a_launch_with_its_structure_by_value() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    launches = [launch_named("first", (3, 2, 1)), launch_named("second", (5, 1, 1), 1 << 16)]
    step = Launcher(context, dependent=True).pack([*launches, launches[0]])
    stream = CudaStream(context)
    api.calls.clear()
    step.queue(stream)
    step.queue(stream)
    assert api.names() == ["cuLaunchKernelEx"] * 6
    _, config, function, arguments, extra = api.calls[1]
    assert (config.gridDimX, config.gridDimY, config.blockDimX) == (5, 1, 256)
    assert (config.sharedMemBytes, config.hStream, config.numAttrs) == (1 << 16, 17, 1)
    assert (function, extra) == ("function second", 0)
    structure = Arguments.from_address(ctypes.c_uint64.from_address(arguments).value)
    assert (structure.address, structure.count) == (1 << 40, 7)


def test_a_launch_that_is_apart_waits_for_its_predecessor_to_end() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    one = launch_named("one", (3, 1, 1))
    step = Launcher(context, dependent=True).pack([one, one._replace(apart=True), one])
    stream = CudaStream(context)
    api.calls.clear()
    step.queue(stream)
    assert [hasattr(call[1], "attrs") for call in api.calls] == [True, False, True]


def test_launches_wait_for_one_another_where_the_gpu_knows_no_dependents() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=False).pack([launch_named("only", (1, 1, 1))])
    step.queue(CudaStream(context))
    assert not hasattr(api.calls[-1][1], "attrs")


def test_a_launch_of_a_step_that_fails_is_named() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=False).pack([launch_named("only", (1, 1, 1))])
    api.failing["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(HearthError, match="cuLaunchKernelEx of only failed"):
        step.queue(CudaStream(context))


def test_structures_have_the_sizes_of_the_kernels() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (FeedArguments, RowsArguments, BatchArguments)]
    assert sizes == [104, 24, 112]
    kinds = (NodesArguments, ProposalArguments, FinishArguments, PathArguments, WalkArguments)
    assert ctypes.sizeof(WideArguments) == 24
    assert 2 * SPOTS * 41016 == WORK_BYTES
    assert [ctypes.sizeof(kind) for kind in kinds] == [40, 128, 56, 16, 64]
    assert ctypes.sizeof(RotaryArguments) == 64
    assert ctypes.sizeof(LengthsArguments) == 8 + 4 * 256
    assert ctypes.sizeof(Moves) == 4 + 3 * 4 * MOVES
    assert (ROW.itemsize, RESULT.itemsize) == (48, 184)


def test_host_and_device_take_turns_among_as_many_slots_of_recorded_picks() -> None:
    source = (files("hearth.runtime.csrc") / "sampling" / "rows.cuh").read_text()
    assert f"#define SLOTS {CAPTURED_SLOTS}\n" in source


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (256, (16, "uint4")),
        (24, (8, "uint2")),
        (12, (4, "unsigned")),
        (514, (2, "unsigned short")),
    ],
)
def test_rows_are_copied_in_the_widest_unit(nbytes: int, expected: tuple[int, str]) -> None:
    assert copy_unit(nbytes) == expected


def test_a_type_without_a_kernel_is_refused() -> None:
    assert index_type(np.dtype(np.int32), "start") == "int"
    assert float_type(np.dtype(np.float16), "table") == "half_bits"
    with pytest.raises(HearthError, match="no CUDA kernel for start of type uint8"):
        index_type(np.dtype(np.uint8), "start")
    with pytest.raises(HearthError, match="no CUDA kernel for table of type float64"):
        float_type(np.dtype(np.float64), "table")
    with pytest.raises(HearthError, match="3 bytes"):
        copy_unit(3)


def moved(moves: list[RowMove]) -> list[tuple[int, ...]]:
    """The grids that are launched for `moves` of rows of 3 heads, 10 slots, 100 units."""
    api = FakeDriver()
    rows, table = RowsArguments(0, 3, 10, 100), Moves()
    queue_moves(launch_of(api, rows, table), rows, table, moves, 4)
    return [call[2:5] for call in api.calls if call[0] == "cuLaunchKernel"]


def test_moves_cover_the_used_slots_alone() -> None:
    assert moved([RowMove(0, 0, 9), RowMove(2, 1, 4), RowMove(3, 2, 5)]) == [(2, 3, 4)]
    assert moved([RowMove(0, 0, 9), RowMove(2, 1, 0)]) == []
    assert moved([RowMove(1, 3, 9), RowMove(0, 1, 9)]) == [(4, 3, 4)]
    assert moved([RowMove(i + 1, i, 1) for i in range(MOVES + 1)]) == [(1, 3, 4)] * 2


@pytest.mark.parametrize(
    "moves",
    [
        [RowMove(0, 1, 4), RowMove(1, 2, 4)],
        [RowMove(2, 1, 4), RowMove(1, 0, 4)],
        [RowMove(2, 1, 4), RowMove(3, 1, 4)],
    ],
)
def test_rows_that_would_overwrite_one_another_are_refused(moves: list[RowMove]) -> None:
    with pytest.raises(HearthError, match="cannot be moved in this order"):
        moved(moves)


def test_settings_become_what_the_kernels_read() -> None:
    params = RequestOptions(temperature=1e-50, top_k=31, seed=(1 << 64) - 1, logprobs=0)
    row = np.array([row_settings(params, 31)], ROW)[0]
    assert row["temperature"] == np.finfo(np.float32).tiny
    assert (row["top_k"], row["logprobs"], row["flags"]) == (0, 0, 0)
    assert int(row["seed"]) == (1 << 64) - 1
    plain = RequestOptions(top_k=3, top_p=0.5, min_p=0.1, seed=9)
    assert is_greedy(row_settings(plain, 31))
    for other in (
        params,
        RequestOptions(logprobs=0),
        RequestOptions(presence_penalty=1),
        RequestOptions(logit_bias=((3, 1.0),)),
    ):
        assert not is_greedy(row_settings(other, 31))
    assert row_settings(RequestOptions(presence_penalty=1, logit_bias=((3, 1.0),)), 31)[-1] == 3


SMALL = simulated_config(vocab_size=97, layers=2, max_batch=4, capacity=64, prefill_chunk=16)
CONFIG = structs.replace(SMALL, device="cuda")
CODES = {
    CUresult.CUDA_ERROR_OUT_OF_MEMORY: "out_of_memory",
    CUresult.CUDA_ERROR_INVALID_VALUE: "executor_failed",
    CUresult.CUDA_ERROR_ILLEGAL_ADDRESS: "device_lost",
}


class LaunchingEngine:
    """A step is one launch; the engine must be closed before the context goes."""

    required_context_memory = 64

    def __init__(self, registry: TensorRegistry, device: Device, api: ResourceDriver) -> None:
        assert isinstance(device, CudaDevice)
        self.io_tensors = tuple(
            IOTensor(spec.name, spec.direction, spec.dtype, spec.shape) for spec in registry.specs
        )
        self._context, self._api = device.context, api
        self._number = api.give("engine")

    def use_profile(self, _profile: int, _stream: Stream) -> None:
        pass

    def set_context_memory(self, _memory: Tensor) -> None:
        pass

    def run(self, _bindings: Sequence[Binding], stream: Stream) -> None:
        self._context.driver.call("cuLaunchKernel", *[0] * 8, stream.handle)

    def capture(self, bindings: Sequence[Binding], stream: Stream) -> CapturedRun:
        self.run(bindings, stream)
        with GraphCapture(self._context, stream) as capture:  # type: ignore[arg-type] # it is ours
            self.run(bindings, stream)
        return capture.graph

    def close(self) -> None:
        self._api.take("engine", self._number)


class Life:
    """One runtime from its opening to its end; `error` is what it raised on the way."""

    def __init__(self, api: ResourceDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        def open_engine(
            _folder: Path,
            _config: LLMEngineRunnerConfig,
            _options: EngineOptions,
            device: Device,
            registry: TensorRegistry,
            **_: object,
        ) -> LaunchingEngine:
            return LaunchingEngine(registry, device, api)

        monkeypatch.setattr(engine_executor, "_open_engine", open_engine)
        monkeypatch.setattr(cuda_device, "open_context", lambda _: CudaContext(CudaDriver(api)))
        monkeypatch.setattr(cuda_device, "KernelCompiler", lambda *_: NoCompiler())
        monkeypatch.setattr(cuda_device, "load_compiler_api", lambda: None)
        # To zero the slots of a real one takes longer than all calls together.
        monkeypatch.setattr(cuda_device, "_LOADING_BYTES", 4096)
        self.runtime: LLMInferenceRuntime | None = None
        self.error: HearthError | None = None
        try:
            self._live()
        except HearthError as error:
            self.error = error

    def batch(self) -> None:
        assert self.runtime is not None
        numbers = self.runtime.admit(
            [
                row(20, 4),
                row(5, 1, RequestOptions(temperature=1.0, seed=1)),
                row(3, 9, RequestOptions(repetition_penalty=1.2, logit_bias=((5, 1.0),))),
                row(2, 6),
            ]
        )
        for step in range(1000):
            if step == 4:
                self.runtime.leave(3)
            if not self.runtime.active:
                break
            failure = self.runtime.step().failure
            if failure is not None:
                # Its rows are lost, and so that the next batch finds places the others go.
                for number in numbers:
                    self.runtime.leave(number)
                raise failure

    def _live(self) -> None:
        folder, options = Path(), EngineOptions()
        self.runtime = LLMInferenceRuntime.create(DeploymentConfig(CONFIG), folder, options)
        self.runtime.capture([1, 2, 3, 4])
        self.batch()
        self.batch()


def row(length: int, tokens: int, sampling: RequestOptions | None = None) -> RowRequest:
    return RowRequest(
        token_ids=list(range(3, 3 + length)),
        prompt_length=length,
        options=structs.replace(sampling or RequestOptions(), max_tokens=tokens, ignore_eos=True),
    )


def close(life: Life, api: ResourceDriver) -> None:
    """Close the runtime, which may raise only what the driver says here for the first time."""
    known, raised = api.failed is not None, None
    try:
        if life.runtime is not None:
            life.runtime.close()
    except HearthError as error:
        raised = error
    if raised is not None:
        assert not known
        assert str(api.failed) in raised.message
        assert raised.code != "device_lost"
    assert api.misuse == [], (api.failed, api.misuse)
    if not api.lost:
        assert api.alive == {}, (api.failed, api.count)
    assert "engine" not in {kind for kind, _ in api.alive}


def check_error(life: Life, api: ResourceDriver, code: str) -> None:
    error = life.error
    if error is None:
        # An ordinary run took the place of the graph.
        assert life.runtime is not None
        counters = life.runtime.counters
        assert api.failed == "cuGraphLaunch" or counters.failed_captures == 1
        assert counters.failed_captures == 0 or str(api.failed) in counters.failure
        return
    assert error.code == code
    assert error.field == "capacity" or str(api.failed) in error.message


@pytest.mark.slow
@pytest.mark.parametrize("status", CODES)
def test_whatever_fails_is_named_and_all_is_given_back_once(
    status: CUresult, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ResourceDriver()
    life = Life(whole, monkeypatch)
    assert life.error is None
    close(life, whole)
    for failing_call in range(1, whole.count + 1):
        api = ResourceDriver(failing_call, status)
        life = Life(api, monkeypatch)
        if api.failed is not None:
            check_error(life, api, CODES[status])
        if life.error is not None and life.runtime is not None and not api.lost:
            life.batch()
        close(life, api)
        assert api.failed is not None
