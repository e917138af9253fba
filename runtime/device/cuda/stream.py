from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.events import CudaEvent


class CudaStream:
    """A queue of device work that does not wait for the default stream; calls raise its errors."""

    def __init__(self, context: CudaContext) -> None:
        self._driver = context.driver
        flags = self._driver.api.CUstream_flags
        self.native = self._driver.call("cuStreamCreate", int(flags.CU_STREAM_NON_BLOCKING))
        self.handle = int(self.native)
        self._copy_in = self._driver.function("cuMemcpyHtoDAsync")
        self._copy_out = self._driver.function("cuMemcpyDtoHAsync")

    def synchronize(self) -> None:
        """Return when everything that was queued has ended; raises what it raised."""
        self._driver.call("cuStreamSynchronize", self.native)

    def wait(self, event: CudaEvent) -> None:
        """Hold later work of this stream until `event` is reached; the host does not wait."""
        self._driver.call("cuStreamWaitEvent", self.native, event.native, 0)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy from pinned host memory to the device."""
        (status,) = self._copy_in(target, source, nbytes, self.native)
        if status:
            raise self._driver.failure("cuMemcpyHtoDAsync", status)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy from the device to pinned host memory."""
        (status,) = self._copy_out(target, source, nbytes, self.native)
        if status:
            raise self._driver.failure("cuMemcpyDtoHAsync", status)

    def zero(self, target: int, nbytes: int) -> None:
        """Queue the zeroing of device memory."""
        self._driver.call("cuMemsetD8Async", target, 0, nbytes, self.native)

    def close(self) -> None:
        """Give the stream back; calling it twice is harmless."""
        if self.handle:
            self.handle = 0
            self._driver.call("cuStreamDestroy", self.native)
