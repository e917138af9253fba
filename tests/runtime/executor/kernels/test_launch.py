import ctypes
from pathlib import Path
from typing import Any

import pytest

from runtime.device.cuda import launch as cuda_launch
from runtime.device.cuda.compiler import kernel_source
from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.driver import CudaDriver
from runtime.device.cuda.stream import CudaStream
from runtime.errors import HearthError
from runtime.executor.kernels.launch import (
    GpuFacts,
    Launch,
    Launcher,
    Programs,
    WantedKernels,
)
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver
from tests.runtime.executor.kernels.model_shapes import GPUS


class Arguments(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("count", ctypes.c_int32))


class FakeCompiler:
    def __init__(self, *known: tuple[str, tuple[str, ...]]) -> None:
        self.known = known
        self.compiled: list[tuple[str, tuple[str, ...]]] = []

    def has(self, name: str, _source: str, options: tuple[str, ...]) -> bool:
        return (name, options) in self.known

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> bytes:
        self.compiled.append((name, options))
        return f"{name} {source}".encode()


@pytest.fixture
def api() -> FakeDriver:
    made = FakeDriver()
    made.results["cuModuleLoadData"] = ("module",)
    made.results["cuModuleGetFunction"] = ("function",)
    return made


@pytest.fixture(autouse=True)
def _sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "kernel_source", lambda *where: " of ".join(where))


def launch(name: str, grid: tuple[int, int, int], shared_bytes: int = 0) -> Launch:
    return Launch(f"function {name}", grid, 256, shared_bytes, Arguments(1 << 40, 7), name)


def programs(api: FakeDriver, compiler: Any) -> Programs:
    return Programs(CudaContext(CudaDriver(api)), compiler, facts=GPUS["H200"])


def test_a_driver_that_captures_no_early_launches_gets_none(api: FakeDriver) -> None:
    api.results["cuDriverGetVersion"] = (12020,)
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=True).pack([launch("only", (1, 1, 1))])
    api.calls.clear()
    step.queue(CudaStream(context))
    config = api.calls[-1][1]
    assert not hasattr(config, "attrs")


def test_facts_are_those_of_the_gpu(api: FakeDriver) -> None:
    api.results["cuOccupancyMaxActiveClusters"] = (1,)
    facts = GpuFacts.of(CudaContext(CudaDriver(api)))
    assert facts == ((9, 9), 9, 9, 9, 8)
    asked = [call[1] for call in api.calls if call[0] == "cuDeviceGetAttribute"]
    assert asked[-2:] == [
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    ]
    assert facts.dependent
    assert not facts._replace(capability=(8, 9)).dependent


def test_a_step_is_one_call_a_launch_with_its_structure_by_value(api: FakeDriver) -> None:
    context = CudaContext(CudaDriver(api))
    launches = [launch("first", (3, 2, 1)), launch("second", (5, 1, 1), 1 << 16)]
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


def test_a_launch_that_is_apart_waits_for_its_predecessor_to_end(api: FakeDriver) -> None:
    context = CudaContext(CudaDriver(api))
    one = launch("one", (3, 1, 1))
    step = Launcher(context, dependent=True).pack([one, one._replace(apart=True), one])
    stream = CudaStream(context)
    api.calls.clear()
    step.queue(stream)
    assert [hasattr(call[1], "attrs") for call in api.calls] == [True, False, True]


def test_launches_wait_for_one_another_where_the_gpu_knows_no_dependents(api: FakeDriver) -> None:
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=False).pack([launch("only", (1, 1, 1))])
    step.queue(CudaStream(context))
    assert not hasattr(api.calls[-1][1], "attrs")


def test_a_launch_that_fails_is_named(api: FakeDriver) -> None:
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=False).pack([launch("only", (1, 1, 1))])
    api.failing["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(HearthError, match="cuLaunchKernelEx of only failed"):
        step.queue(CudaStream(context))


def test_a_kernel_is_compiled_once_for_each_set_of_macros(api: FakeDriver) -> None:
    compiler = FakeCompiler()
    made = programs(api, compiler)
    sets: list[dict[str, int | str]] = [{"A": 1, "B": "half"}, {"B": "half", "A": 1}, {"A": 2}]
    for macros in sets:
        assert made.kernel("product", "narrow", macros) == "function"
    assert compiler.compiled == [("product", ("-DA=1", "-DB=half")), ("product", ("-DA=2",))]
    (loaded, _) = [call for call in api.calls if call[0] == "cuModuleLoadData"]
    assert loaded[1] == b"product product of runtime.executor.kernels.source"
    made.close()
    assert api.names().count("cuModuleUnload") == 2


def test_shared_memory_is_asked_for_once_and_never_made_less(api: FakeDriver) -> None:
    made = programs(api, FakeCompiler())
    for shared_bytes in (0, 70_000, 60_000, 90_000):
        made.kernel("product", "narrow", {}, shared_bytes)
    prefix = "CU_FUNC_ATTRIBUTE_"
    asked = [call[2:] for call in api.calls if call[0] == "cuFuncSetAttribute"]
    assert asked == [
        (f"{prefix}PREFERRED_SHARED_MEMORY_CARVEOUT", 100),
        (f"{prefix}MAX_DYNAMIC_SHARED_SIZE_BYTES", 70_000),
        (f"{prefix}MAX_DYNAMIC_SHARED_SIZE_BYTES", 90_000),
    ]


def test_wanted_kernels_are_loaded_ahead(api: FakeDriver) -> None:
    wanted = WantedKernels()
    for name in ("narrow", "narrow", "other"):
        wanted.kernel("product", name, {"A": 1}, 70_000)
    compiler = FakeCompiler()
    made = programs(api, compiler)
    made.load(wanted.requests, threads=2)
    assert len(wanted.requests) == 2
    assert set(compiler.compiled) == {("product", ("-DA=1",))}
    before = len(api.calls)
    made.kernel("product", "other", {"A": 1}, 70_000)
    assert len(api.calls) == before


@pytest.mark.parametrize("known", [0, 1, 3])
def test_how_many_kernels_are_compiled_is_told_where_some_are_missing(
    api: FakeDriver, known: int
) -> None:
    wanted, heard = WantedKernels(), list[tuple[str, float | None]]()
    for number in range(3):
        wanted.kernel("product", "narrow", {"A": number})
    compiler = FakeCompiler(*(("product", (f"-DA={number}",)) for number in range(known)))
    made = programs(api, compiler)
    made.load(wanted.requests, threads=2, told=lambda stage, share: heard.append((stage, share)))
    missing = 3 - known
    shares = [("compiling", done / missing) for done in range(missing + 1)] if missing else []
    assert heard == ([*shares, ("opening", None)] if missing else [])


def test_headers_are_put_in_once_wherever_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sources_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.cuh").write_text("int one;\n")
    (package / "two.cuh").write_text('#include "one.cuh"\nint two;\n')
    (package / "all.cu").write_text('#include "one.cuh"\n#include "two.cuh"\nint all;\n')
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    assert kernel_source("all", package.name) == "int one;\nint two;\nint all;\n"
