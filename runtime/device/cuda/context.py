from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from hearth.runtime.device.cuda.driver import CudaDriver, load_driver_api
from hearth.runtime.errors import HearthError
from hearth.runtime.undo import undoing

_NAME_BYTES = 256
_FIRST_DRIVER_WITH_DEPENDENTS = 12030
FIRST_WITH_DEPENDENTS = (9, 0)
"""Least compute capability with which a kernel can begin before its predecessor has ended."""


class DeviceProperties(NamedTuple):
    """Properties of a GPU; `compute_capability` is (major, minor), `integrated`: in host memory."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    integrated: bool

    @property
    def architecture(self) -> str:
        """The compiler's name, such as `sm_90`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


class CudaContext:
    """The primary context of a device, which other CUDA libraries in the process share."""

    def __init__(self, driver: CudaDriver, ordinal: int = 0) -> None:
        self.driver = driver
        self.open_events: set[Callable[[], None]] = set()
        """Callables that destroy the events that are still open."""
        driver.call("cuInit", 0)
        devices = driver.call("cuDeviceGetCount")
        if not 0 <= ordinal < devices:
            raise HearthError(
                "engine_incompatible", f"there is no GPU {ordinal}, only {devices}", "device"
            )
        self._device = driver.call("cuDeviceGet", ordinal)
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        with undoing() as undo:
            undo.callback(self.close)
            self.make_current()
            self.properties = self._properties()

    @property
    def takes_dependents(self) -> bool:
        """True if programmatic dependent launch is available, in captured graphs as well.

        Drivers before that of CUDA 12.3 lack the latter; there each kernel begins behind its
        predecessor's end.
        """
        known = self.properties.compute_capability >= FIRST_WITH_DEPENDENTS
        return known and self.driver.call("cuDriverGetVersion") >= _FIRST_DRIVER_WITH_DEPENDENTS

    def make_current(self) -> None:
        """Make this context the calling thread's; each thread that uses the device needs it."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all, by the driver's count."""
        free, total = self.driver.call("cuMemGetInfo")
        return int(free), int(total)

    def free_memory(self) -> int | None:
        """Bytes free beside this context, by the driver's count.

        None for an integrated GPU: its driver does not count memory that the system can reclaim.
        """
        return None if self.properties.integrated else self.memory()[0]

    def close_events(self) -> None:
        """Destroy every event that is still open."""
        with ExitStack() as closing:
            for close in self.open_events:
                closing.callback(close)

    def close(self) -> None:
        """Give the context back; calling it twice is harmless."""
        if self._context is not None:
            self._context = None
            self.driver.call("cuDevicePrimaryCtxRelease", self._device)

    def attribute(self, name: str) -> int:
        """Return an attribute of the GPU; `name` is without `CU_DEVICE_ATTRIBUTE_`."""
        key = getattr(self.driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", key, self._device))

    def _properties(self) -> DeviceProperties:
        name = self.driver.call("cuDeviceGetName", _NAME_BYTES, self._device)
        capability = (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        return DeviceProperties(
            name.split(b"\0")[0].decode(),
            capability,
            self.attribute("MULTIPROCESSOR_COUNT"),
            bool(self.attribute("INTEGRATED")),
        )


def open_context(ordinal: int = 0) -> CudaContext:
    """The primary context of a GPU; raises `engine_incompatible` if there is none."""
    return CudaContext(CudaDriver(load_driver_api()), ordinal)
