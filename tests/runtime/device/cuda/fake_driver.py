"""A driver module without a GPU: every call succeeds unless its name is in `failing`."""

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_INVALID_VALUE = 1


class FakeDriver:
    def __init__(self) -> None:
        self.failing: dict[str, CUresult] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, tuple[Any, ...]] = {
            "cuDeviceGetCount": (1,),
            "cuDeviceGet": (0,),
            "cuDriverGetVersion": (13000,),
            "cuDevicePrimaryCtxRetain": ("context",),
            "cuDeviceGetName": (b"Fake GPU\0\0",),
            "cuDeviceTotalMem": (1 << 30,),
            "cuDeviceGetAttribute": (9,),
            "cuMemGetInfo": (5 << 30, 7 << 30),
            "cuEventCreate": ("event",),
            "cuStreamCreate": (17,),
            "cuStreamEndCapture": (23,),
            "cuGraphInstantiate": ("graph",),
            "cuGraphGetNodes": ((), 2),
            "cuOccupancyMaxActiveClusters": (0,),
        }
        self.CUdevice_attribute = _Names()
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUstreamCaptureMode = _Names()
        self.CUfunction_attribute = self.CUlaunchAttributeID = _Names()
        self.CUlaunchConfig = _Config
        self.CUlaunchAttribute = _Attribute
        self.CUevent_flags = SimpleNamespace(CU_EVENT_BLOCKING_SYNC=1, CU_EVENT_DISABLE_TIMING=2)

    def cuGetErrorName(self, status: CUresult) -> tuple[int, bytes]:  # noqa: N802 - the library's name
        return 0, status.name.encode()

    def cuGetErrorString(self, status: CUresult) -> tuple[int, bytes]:  # noqa: N802 - the library's name
        return 0, f"text of {int(status)}".encode()

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            status = self.failing.get(name, CUresult.CUDA_SUCCESS)
            return (status, *self.results.get(name, ()))

        return call

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class _Config(SimpleNamespace):
    """Filled as its users like."""


class _Attribute(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(value=SimpleNamespace(clusterDim=SimpleNamespace()))


class _Names:
    def __getattr__(self, name: str) -> str:
        return name
