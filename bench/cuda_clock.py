import time
from collections.abc import Callable

import numpy as np

from runtime.device.cuda.cuda_device import CudaDevice
from runtime.device.cuda.stream import CudaEvent

CALLS, ROUNDS = 100, 9
DELAY_BYTES, DELAYS = 1 << 30, 12

Figures = dict[str, float]


class Clock:
    """Microseconds of an op, in Python and on the device: medians over some rounds."""

    def __init__(self, gpu: CudaDevice) -> None:
        self.gpu = gpu
        self._first = CudaEvent(gpu.context, timing=True)
        self._last = CudaEvent(gpu.context, timing=True)
        self._delay = gpu.zeros("delay", (DELAY_BYTES,), np.dtype(np.uint8))

    def time(self, name: str, op: Callable[[], object], calls: int = CALLS) -> Figures:
        """The figures `{name}_python_us` and `{name}_gpu_us` of one call."""
        rounds = [self._round(op, calls) for _ in range(ROUNDS)]
        python, device = (float(np.median(part)) for part in zip(*rounds, strict=True))
        return {f"{name}_python_us": round(python, 2), f"{name}_gpu_us": round(device, 2)}

    def _round(self, op: Callable[[], object], calls: int) -> tuple[float, float]:
        # The device is kept busy until all calls are queued: then it runs them without a gap.
        for _ in range(DELAYS):
            self.gpu.stream.zero(self._delay.address, DELAY_BYTES)
        self._first.record(self.gpu.stream)
        begin = time.perf_counter()
        for _ in range(calls):
            op()
        python = time.perf_counter() - begin
        self._last.record(self.gpu.stream)
        self._last.wait()
        return python / calls * 1e6, self._last.elapsed_ms(self._first) / calls * 1e3
