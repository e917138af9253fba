import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.device.cuda import cuda_device
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.memory import host_array
from hearth.runtime.errors import HearthError
from tests.runtime.device.cuda.fake_driver import CUresult
from tests.runtime.device.cuda.resource_driver import ResourceDriver


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
