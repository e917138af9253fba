import time

from hearth.runtime.device.cuda.context import CudaContext

_NOT_READY = 600
# A sleep ends late by most of the first; looking for the second takes no more than a waking would.
_EARLY_S, _PATIENCE_S = 120e-6, 300e-6


class CudaEvent:
    """A point in a stream; `timing` events can be subtracted.

    A thread that waits sleeps: it is a step ahead of the device, and other programs need the
    processor on which it would spin. An event that is never closed is destroyed with its context.
    """

    def __init__(self, context: CudaContext, *, timing: bool = False) -> None:
        self._driver = context.driver
        self._open = context.open_events
        flags = self._driver.api.CUevent_flags
        kind = int(flags.CU_EVENT_BLOCKING_SYNC)
        if not timing:
            kind |= int(flags.CU_EVENT_DISABLE_TIMING)
        self.native = self._driver.call("cuEventCreate", kind)
        self._record = self._driver.function("cuEventRecord")
        self._query = self._driver.function("cuEventQuery")
        self._wait = self._driver.function("cuEventSynchronize")
        self._open.add(self.close)

    def record(self, stream: "CudaStream") -> None:
        """Record the event behind all work queued on `stream` so far."""
        (status,) = self._record(self.native, stream.native)
        if status:
            raise self._driver.failure("cuEventRecord", status)

    def query(self) -> bool:
        """Return True if all work before the event has ended; raises the error of that work."""
        (status,) = self._query(self.native)
        if status and int(status) != _NOT_READY:
            raise self._driver.failure("cuEventQuery", status)
        return not status

    def wait(self) -> None:
        """Return when all work before the event has ended; raises the error of that work."""
        (status,) = self._wait(self.native)
        if status:
            raise self._driver.failure("cuEventSynchronize", status)

    def wait_from(self, expected: float) -> bool:
        """Poll the event from the expected time on, in seconds of the monotonic clock.

        Returns True if the event was still ahead then. Meant for waits that the device waits for
        in turn: a thread that sleeps is woken 40 us late (H200).
        """
        early = expected - _EARLY_S - time.monotonic()
        if early > 0:
            time.sleep(early)
        if self.query():
            return False
        late = time.monotonic() + _PATIENCE_S
        while not self.query():
            if time.monotonic() > late:
                self.wait()
        return True

    def elapsed_ms(self, since: "CudaEvent") -> float:
        """Milliseconds between two timing events that have both been reached."""
        return float(self._driver.call("cuEventElapsedTime", since.native, self.native))

    def close(self) -> None:
        """Give the event back; calling it twice is harmless."""
        if self.native is not None:
            event, self.native = self.native, None
            self._open.discard(self.close)
            self._driver.call("cuEventDestroy", event)


class CudaStream:
    """A queue of device work that does not wait for the default stream; calls raise its errors."""

    def __init__(self, context: CudaContext) -> None:
        self._driver = context.driver
        flags = self._driver.api.CUstream_flags
        self.native = self._driver.call("cuStreamCreate", int(flags.CU_STREAM_NON_BLOCKING))
        self.handle = int(self.native)
        self._copy_in = self._driver.function("cuMemcpyHtoDAsync")
        self._copy_out = self._driver.function("cuMemcpyDtoHAsync")
        self._copy = self._driver.function("cuMemcpyAsync")

    def synchronize(self) -> None:
        """Return when all queued work has ended; raises the error of that work."""
        self._driver.call("cuStreamSynchronize", self.native)

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

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between memory of the device or pinned memory, whichever each is."""
        (status,) = self._copy(target, source, nbytes, self.native)
        if status:
            raise self._driver.failure("cuMemcpyAsync", status)

    def zero(self, target: int, nbytes: int) -> None:
        """Queue the zeroing of device memory."""
        self._driver.call("cuMemsetD8Async", target, 0, nbytes, self.native)

    def fill(self, target: int, word: int) -> None:
        """Queue the writing of one 32-bit word."""
        self._driver.call("cuMemsetD32Async", target, word, 1, self.native)

    def close(self) -> None:
        """Give the stream back; calling it twice is harmless."""
        if self.handle:
            self.handle = 0
            self._driver.call("cuStreamDestroy", self.native)


class CudaSpan:
    """Span of a stream's work between two timing events.

    The events are destroyed once `seconds` is known.
    """

    def __init__(self, context: CudaContext, stream: CudaStream) -> None:
        self._stream = stream
        self._first = CudaEvent(context, timing=True)
        self._last = CudaEvent(context, timing=True)
        self._seconds: float | None = None
        self._first.record(stream)

    def end(self) -> None:
        """End the span: work that is queued from now on is not part of it."""
        self._last.record(self._stream)

    @property
    def seconds(self) -> float | None:
        """Seconds that the GPU took for the span; None until its end."""
        if self._seconds is None and self._last.query():
            self._seconds = self._last.elapsed_ms(self._first) / 1e3
            self._first.close()
            self._last.close()
        return self._seconds
