import subprocess
import sys
from typing import Any

import pytest

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver, error_code
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
