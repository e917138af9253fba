from typing import TYPE_CHECKING

from runtime.device.cuda.context import CudaContext

if TYPE_CHECKING:
    from runtime.device.cuda.stream import CudaStream

_NOT_READY = 600


class CudaEvent:
    """A point in a stream; `timing` events can be subtracted.

    A thread that waits sleeps: it is a step ahead of the device, and a processor that spins
    would be missed by whatever else the machine runs. An event that nobody closes is given back
    with its context.
    """

    def __init__(self, context: CudaContext, *, timing: bool = False) -> None:
        self._driver = context.driver
        self._open = context.events
        flags = self._driver.api.CUevent_flags
        kind = int(flags.CU_EVENT_BLOCKING_SYNC)
        if not timing:
            kind |= int(flags.CU_EVENT_DISABLE_TIMING)
        self.native = self._driver.call("cuEventCreate", kind)
        self._record = self._driver.function("cuEventRecord")
        self._query = self._driver.function("cuEventQuery")
        self._wait = self._driver.function("cuEventSynchronize")
        self._open.add(self)

    def record(self, stream: "CudaStream") -> None:
        """Mark what was queued on `stream` so far."""
        (status,) = self._record(self.native, stream.native)
        if status:
            raise self._driver.failure("cuEventRecord", status)

    def query(self) -> bool:
        """Whether everything before the mark has ended; raises what the work raised."""
        (status,) = self._query(self.native)
        if status and int(status) != _NOT_READY:
            raise self._driver.failure("cuEventQuery", status)
        return not status

    def wait(self) -> None:
        """Return when everything before the mark has ended; raises what the work raised."""
        (status,) = self._wait(self.native)
        if status:
            raise self._driver.failure("cuEventSynchronize", status)

    def elapsed_ms(self, since: "CudaEvent") -> float:
        """Milliseconds between two timing events that have both been reached."""
        return float(self._driver.call("cuEventElapsedTime", since.native, self.native))

    def close(self) -> None:
        """Give the event back; calling it twice is harmless."""
        if self.native is not None:
            event, self.native = self.native, None
            self._open.discard(self)
            self._driver.call("cuEventDestroy", event)
