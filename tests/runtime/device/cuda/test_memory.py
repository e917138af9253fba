import numpy as np
import pytest

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.memory import Arena, CudaMemory, aligned, host_array
from hearth.runtime.errors import HearthError
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver


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
