import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.device.cuda import cuda_device
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver, error_code
from hearth.runtime.device.cuda.gpu_facts import GpuFacts, largest_cluster
from hearth.runtime.device.cuda.memory import Arena, CudaMemory, aligned, host_array
from hearth.runtime.errors import HearthError
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver
from tests.runtime.device.cuda.resource_driver import ResourceDriver


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, "out_of_memory"),
        (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, "device_lost"),
        (CUresult.CUDA_ERROR_INVALID_VALUE, "executor_failed"),
        (CUresult.CUDA_ERROR_NO_DEVICE, "engine_incompatible"),
    ],
)
def test_a_failed_call_is_named_with_cudas_text(status: CUresult, code: str) -> None:
    api = FakeDriver()
    api.failing["cuMemAlloc"] = status
    with pytest.raises(HearthError) as caught:
        CudaDriver(api).call("cuMemAlloc", 8)
    assert caught.value.code == code
    expected = f"cuMemAlloc failed: {status.name}, text of {int(status)}"
    assert caught.value.message.startswith(expected)
    assert ("pip install" in caught.value.message) == (code == "engine_incompatible")


@pytest.mark.parametrize("status", [214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719])
def test_errors_that_end_the_context_are_device_lost(status: int) -> None:
    assert error_code(status) == "device_lost"


def test_results_are_one_value_several_or_none() -> None:
    driver = CudaDriver(FakeDriver())
    assert driver.call("cuStreamCreate", 1) == 17
    assert driver.call("cuMemGetInfo") == (5 << 30, 7 << 30)
    assert driver.call("cuInit", 0) is None


def test_a_missing_driver_library_says_what_to_install() -> None:
    class NoLibrary(FakeDriver):
        def cuInit(self, _flags: int) -> None:  # noqa: N802 - the library's name
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(HearthError, match=r"libcuda.*install the NVIDIA driver") as caught:
        CudaContext(CudaDriver(NoLibrary()))
    assert caught.value.code == "engine_incompatible"


def test_the_primary_context_is_kept_and_given_back_once() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    assert context.properties.name == "Fake GPU"
    assert context.properties.architecture == "sm_99"
    assert context.memory() == (5 << 30, 7 << 30)
    assert ("cuCtxSetCurrent", "context") in api.calls
    context.close()
    context.close()
    assert api.names().count("cuDevicePrimaryCtxRelease") == 1


@pytest.mark.parametrize(("attribute", "free"), [(0, 5 << 30), (1, None)])
def test_an_integrated_gpu_has_no_memory_of_its_own(attribute: int, free: int | None) -> None:
    api = ResourceDriver()
    asked = api.cuDeviceGetAttribute

    def answer(name: str, device: int) -> tuple[Any, ...]:
        if name != "CU_DEVICE_ATTRIBUTE_INTEGRATED":
            return asked(name, device)
        return CUresult.CUDA_SUCCESS, attribute

    vars(api)["cuDeviceGetAttribute"] = answer
    compiler: Any = None
    device = CudaDevice(CudaContext(CudaDriver(api)), compiler)
    assert (device.properties.integrated, device.free_memory()) == (bool(attribute), free)
    device.close()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(HearthError, match="there is no GPU 1, only 1"):
        CudaContext(CudaDriver(FakeDriver()), 1)


def test_nothing_else_of_the_runtime_needs_cuda() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None; import hearth.runtime.device.device, "
        "hearth.runtime.device.cuda.cuda_device as c\n"
        "try: c.open_cuda_device()\n"
        "except c.HearthError as error: print(error.code, 'cuda-bindings==13' in error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["engine_incompatible", "True"]


SHARED = 232_448


class ClusterDriver(FakeDriver):
    """A driver that has room for so many clusters of each size, and refuses other sizes."""

    def __init__(self, room: dict[int, int], capability: int = 9) -> None:
        super().__init__()
        self.room = room
        self.results["cuDeviceGetAttribute"] = (capability,)
        self.results["cuModuleLoadData"] = ("module",)
        self.results["cuModuleGetFunction"] = ("function",)

    def cuOccupancyMaxActiveClusters(  # noqa: N802 - the library's name
        self, function: str, config: Any
    ) -> tuple[CUresult, int]:
        (attribute,) = config.attrs
        size = attribute.value.clusterDim.x
        assert (function, config.gridDimX, config.sharedMemBytes) == ("function", size, SHARED)
        known = size in self.room
        return CUresult.CUDA_SUCCESS if known else CUresult.CUDA_ERROR_INVALID_VALUE, (
            self.room.get(size, 0)
        )


@pytest.mark.parametrize(
    ("room", "largest"),
    [({8: 15, 4: 32, 2: 66}, 8), ({8: 0, 4: 3, 2: 7}, 4), ({2: 1}, 2), ({8: 0, 4: 0, 2: 0}, 1)],
)
def test_the_largest_cluster_is_one_that_the_driver_finds_room_for(
    room: dict[int, int], largest: int
) -> None:
    api = ClusterDriver(room)
    assert largest_cluster(CudaContext(CudaDriver(api)), SHARED) == largest
    assert ("cuModuleUnload", "module") in api.calls


def test_gpus_before_hopper_have_no_clusters() -> None:
    api = ClusterDriver({8: 15}, capability=8)
    assert largest_cluster(CudaContext(CudaDriver(api)), SHARED) == 1
    assert "cuModuleLoadData" not in api.names()


def test_facts_are_those_of_the_gpu() -> None:
    api = FakeDriver()
    api.results["cuModuleLoadData"] = ("module",)
    api.results["cuModuleGetFunction"] = ("function",)
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


class Allocations:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.freed: list[int] = []

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) << 32

    def arena(self, chunk: int, reserve: int = 0) -> Arena:
        return Arena(self.allocate, self.freed.append, chunk, reserve)


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 256), (1, 256), (256, 256), (257, 512)])
def test_sizes_are_rounded_up(nbytes: int, expected: int) -> None:
    assert aligned(nbytes) == expected


def test_tensors_share_a_chunk_until_it_is_full() -> None:
    system = Allocations()
    arena = system.arena(1024)
    addresses = [arena.take(size) for size in (1, 300, 256, 10)]
    assert system.sizes == [1024, 1024]
    first, second = 1 << 32, 2 << 32
    assert addresses == [first, first + 256, first + 768, second]
    assert (arena.allocated, arena.used) == (2048, 1280)


def test_a_large_tensor_gets_its_own_allocation_and_the_chunk_goes_on() -> None:
    system = Allocations()
    arena = system.arena(1024)
    assert arena.take(256) == 1 << 32
    assert arena.take(5000) == 2 << 32
    assert arena.take(256) == (1 << 32) + 256
    assert system.sizes == [1024, 5120]


def test_a_reserve_is_one_allocation_made_at_once() -> None:
    system = Allocations()
    arena = system.arena(1024, reserve=10_000)
    assert system.sizes == [10_240]
    assert arena.take(9000) == 1 << 32
    assert arena.take(1024) == (1 << 32) + 9216
    assert system.sizes == [10_240]


def test_closing_frees_every_chunk_once() -> None:
    system = Allocations()
    arena = system.arena(256)
    arena.take(256)
    arena.take(1000)
    arena.close()
    arena.close()
    assert sorted(system.freed) == [1 << 32, 2 << 32]
    assert arena.allocated == 0


def test_the_tensor_that_found_no_memory_is_named() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    api.failing["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(HearthError, match="no memory for k_cache_3, 4000 bytes") as caught:
        CudaMemory(context).zeros("k_cache_3", (1000,), np.dtype(np.float32))
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "k_cache_3")
    api.failing["cuMemAlloc"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(HearthError, match="cuMemAlloc failed") as caught:
        CudaMemory(context).zeros("k_cache_3", (1000,), np.dtype(np.float32))
    assert caught.value.code == "device_lost"


def test_host_memory_is_seen_as_an_array() -> None:
    backing = np.arange(6, dtype=np.int32)
    view = host_array(backing.ctypes.data, (2, 3), backing.dtype)
    view[1, 2] = 77
    assert backing.tolist() == [0, 1, 2, 3, 4, 77]


class CopyingDriver(ResourceDriver):
    """Its device's memory is the host's, so that copies to it can be seen."""

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        result = super()._call(name, arguments)
        if name == "cuMemcpyHtoDAsync" and not result[0]:
            target, source, nbytes = (int(one) for one in arguments[:3])
            ctypes.memmove(target, source, nbytes)
        return result


def opened(api: ResourceDriver) -> CudaDevice:
    compiler: Any = None
    return CudaDevice(CudaContext(CudaDriver(api)), compiler)


def arrays() -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)
    return {
        "large": random.integers(0, 255, (700, 1000)).astype(np.uint8),
        "small": random.standard_normal(7).astype(np.float16),
        "turned": random.standard_normal((6, 4)).astype(np.float32).T,
    }


def test_large_tensors_arrive_by_way_of_slots_that_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_device, "_LOADING_BYTES", 1 << 16)
    api = CopyingDriver()
    device = opened(api)
    before = {key for key in api.alive if key[0] in ("pinned", "event")}
    given = device.constants(arrays())
    assert {key for key in api.alive if key[0] in ("pinned", "event")} == before
    for name, array in arrays().items():
        assert (given[name].shape, given[name].dtype) == (array.shape, array.dtype)
        stored = host_array(given[name].address, array.shape, array.dtype)
        np.testing.assert_array_equal(stored, array)
    assert device.constants({}) == {}
    device.close()
    assert (api.alive, api.misuse) == ({}, [])


def test_what_fails_on_the_way_leaves_nothing_behind() -> None:
    count, codes = 0, set()
    while True:
        api = CopyingDriver()
        device = opened(api)
        api.failing_call = api.count + count + 1
        try:
            device.constants(arrays())
        except HearthError as error:
            codes.add(error.code)
        api.failing_call = -1
        device.close()
        assert (api.alive, api.misuse) == ({}, []), api.failed
        if api.failed is None:
            break
        count += 1
    assert count > 10
    assert codes <= {"out_of_memory", "executor_failed"}


def test_without_memory_the_tensor_is_named() -> None:
    api = ResourceDriver()
    device = opened(api)
    vars(api)["cuMemAlloc"] = lambda _: (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
    with pytest.raises(HearthError) as caught:
        device.constants({"layers.0.q": np.zeros(4, np.float16)})
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "layers.0.q")
    del vars(api)["cuMemAlloc"]
    device.close()
