from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.stream import CudaEvent, CudaStream
from hearth.runtime.errors import HearthError
from hearth.runtime.undo import undoing

Bytes = NDArray[np.uint8]
_THREADS = 4
_BULK_BYTES = np.dtype(np.uint8)


def bulk_upload(
    context: CudaContext,
    stream: CudaStream,
    arrays: Iterable[tuple[int, Bytes]],
    *,
    slots: int = 8,
    slot_bytes: int,
) -> None:
    """Copy flat arrays to device addresses by way of pinned slots, which threads fill.

    One thread reads a mapped file at a third of the speed at which the device takes it. When this
    returns all bytes are on the device, and the slots are given back.
    """
    with undoing() as closing:
        memory = CudaMemory(context, pinned=slots * slot_bytes)
        closing.callback(memory.close)
        pinned = [
            memory.pinned_zeros(f"upload slot {one}", (slot_bytes,), _BULK_BYTES)
            for one in range(slots)
        ]
        events = []
        for _ in range(slots):
            events.append(CudaEvent(context))
            closing.callback(events[-1].close)
        with undoing() as waiting, ThreadPoolExecutor(_THREADS) as pool:
            # Slots must not go before the copies out of them have ended.
            waiting.callback(stream.synchronize)
            filling: deque[tuple[Future[None], int, int, int]] = deque()

            def send() -> None:
                filled, slot, target, nbytes = filling.popleft()
                filled.result()
                stream.copy_in(target, pinned[slot].address, nbytes)
                events[slot].record(stream)

            for number, (target, data) in enumerate(_pieces(arrays, slot_bytes)):
                slot = number % slots
                if len(filling) == slots:
                    send()
                # The slot's last contents are on the device.
                events[slot].wait()
                done = pool.submit(_fill, pinned[slot].array, data)
                filling.append((done, slot, target, data.size))
            while filling:
                send()
            stream.synchronize()
        # One by one: the first failure is raised.
        for event in events:
            event.close()
        memory.close()


def _pieces(arrays: Iterable[tuple[int, Bytes]], most: int) -> Iterator[tuple[int, Bytes]]:
    for target, data in arrays:
        for first in range(0, data.size, most):
            yield target + first, data[first : first + most]


def _fill(slot: Bytes, data: Bytes) -> None:
    slot[: data.size] = data


_BYTES = np.dtype(np.uint8)


class UploadRing:
    """Pinned slots through which host arrays are copied to the device.

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
        """Number of uploads that had to wait for the device."""

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
            # Without an event the slot could be overwritten before the copy has read it.
            with suppress(HearthError):
                self._stream.synchronize()
            raise
        self._turn = (self._turn + 1) % len(self._slots)
