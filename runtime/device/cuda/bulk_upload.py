from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.stream import CudaEvent, CudaStream
from runtime.undo import undoing

Bytes = NDArray[np.uint8]
_THREADS = 4
_BYTES = np.dtype(np.uint8)


def bulk_upload(
    context: CudaContext,
    stream: CudaStream,
    arrays: Iterable[tuple[int, Bytes]],
    *,
    slots: int = 8,
    slot_bytes: int,
) -> None:
    """Copy flat arrays to device addresses by way of pinned slots, which threads fill.

    One thread reads what a file maps at a third of the speed at which the device takes it. All is
    there, and the slots are given back, when this returns.
    """
    with undoing() as closing:
        memory = CudaMemory(context, pinned=slots * slot_bytes)
        closing.callback(memory.close)
        pinned = [
            memory.pinned_zeros(f"upload slot {one}", (slot_bytes,), _BYTES) for one in range(slots)
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
                # What the slot held before is on the device.
                events[slot].wait()
                done = pool.submit(_fill, pinned[slot].array, data)
                filling.append((done, slot, target, data.size))
            while filling:
                send()
            stream.synchronize()
        # One by one: the first that fails is what is told.
        for event in events:
            event.close()
        memory.close()


def _pieces(arrays: Iterable[tuple[int, Bytes]], most: int) -> Iterator[tuple[int, Bytes]]:
    for target, data in arrays:
        for first in range(0, data.size, most):
            yield target + first, data[first : first + most]


def _fill(slot: Bytes, data: Bytes) -> None:
    slot[: data.size] = data
