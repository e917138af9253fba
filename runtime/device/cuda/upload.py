from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.stream import CudaEvent, CudaStream
from runtime.errors import HearthError

_BYTES = np.dtype(np.uint8)


class UploadRing:
    """Copies host arrays to the device through pinned slots.

    `upload` returns when the array was read; it waits for the device only when all `slots` of
    `slot_bytes` are still being copied.
    """

    def __init__(
        self,
        context: CudaContext,
        memory: CudaMemory,
        stream: CudaStream,
        slots: int = 16,
        slot_bytes: int = 64 << 10,
    ) -> None:
        self._stream = stream
        self._slots = [
            memory.pinned_zeros(f"upload slot {i}", (slot_bytes,), _BYTES) for i in range(slots)
        ]
        self._events = [CudaEvent(context) for _ in range(slots)]
        self._slot_bytes = slot_bytes
        self._turn = 0
        self.waits = 0
        """How often an upload had to wait for the device."""

    def upload(self, target: int, array: NDArray[Any]) -> None:
        """Copy `array` to the device address `target`, in the stream's order."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for first in range(0, data.size, self._slot_bytes):
            self._send(target + first, data[first : first + self._slot_bytes])

    def _send(self, target: int, data: NDArray[np.uint8]) -> None:
        slot, event = self._slots[self._turn], self._events[self._turn]
        if not event.query():
            self.waits += 1
            event.wait()
        slot.array[: data.size] = data
        self._stream.copy_in(target, slot.address, data.size)
        try:
            event.record(self._stream)
        except HearthError:
            # Without a mark nobody would wait before the slot is written again.
            with suppress(HearthError):
                self._stream.synchronize()
            raise
        self._turn = (self._turn + 1) % len(self._slots)
