import ctypes
from collections.abc import Callable

import numpy as np

from runtime.device.cuda.launch import KernelLaunch
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.sample_ring import CudaPendingSamples, SampleRing, SampleSlot
from runtime.device.cuda.stream import CudaStream

# `Turn` of csrc/sampling/rows.cuh: number, rows that are done, and those that are live.
_WORDS, _LIVE = 4, 8

Draw = Callable[[SampleSlot, int], CudaPendingSamples]
"""Queues what follows the scan of so many rows, whose results are in the slot."""


class CudaRecordedPicks:
    """Scans as part of a recording, and what rows draw behind it.

    A launch cannot be told its slot of results, so host and device take turns alike.
    """

    def __init__(
        self,
        memory: CudaMemory,
        stream: CudaStream,
        ring: SampleRing,
        *,
        batch: ctypes.Structure,
        scan: tuple[KernelLaunch, int],
        draw: Draw,
    ) -> None:
        self._turn = memory.zeros("turn of samples", (_WORDS,), np.dtype(np.int32)).address
        self._stream, self._ring = stream, ring
        self._batch, self._scan, self._draw = batch, scan, draw
        self._rows = 0

    def expect(self, rows: int) -> None:
        """Write the number of rows where the scans find it, if it is another."""
        if rows != self._rows:
            self._stream.fill(self._turn + _LIVE, rows)
            self._rows = rows

    def queue(self, rows: int) -> None:
        """Queue a scan of all these rows."""
        batch, (launch, blocks) = self._batch, self._scan
        batch.results = self._ring.address
        batch.first, batch.picked, batch.turn = 0, rows, self._turn
        try:
            launch.launch_dependent(blocks, rows)
        finally:
            batch.turn = 0

    def samples(self) -> CudaPendingSamples:
        """Take the turn of the launch, and queue what rows draw."""
        return self._draw(self._ring.take(), self._rows)
