"""The memory-read floor: the least time in which the weights can be read once.

A decode step must read every weight, so no step is faster than the fastest read of as many bytes
by as many threads. The buffer is read by two matrix-vector kernels of NumPy's BLAS; they multiply,
yet they wait for memory: they read several rows at once, and one core needs that many streams to
draw its full bandwidth. A plain read from one end to the other is a quarter slower, so a good
matrix product can beat it: it is measured beside the floor and is not the floor.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

Kernel = Callable[[NDArray[np.float32]], object]
PASSES = 10
"""Passes by each kernel; the best of all is the floor."""
_COLUMNS = 4096
_LEAST_BYTES = 1 << 28


def repeats(size: int) -> int:
    """How often a pass reads a buffer of `size` bytes.

    Small ones are read often: the time to wake the threads must not count as reading.
    """
    return max(1, _LEAST_BYTES // size)


class MemoryReader:
    """Reads a buffer of `size` bytes, rounded to 16 KiB, with `threads` threads.

    The process must have started with the BLAS at one thread (`OPENBLAS_NUM_THREADS=1`):
    the threads here are the readers.
    """

    def __init__(self, size: int, threads: int) -> None:
        rows = max(threads, round(size / (4 * _COLUMNS)))
        self._repeats = range(repeats(size))
        self._parts = np.array_split(np.ones((rows, _COLUMNS), np.float32), threads)
        self._kernels = cycle(KERNELS)
        self._pool = ThreadPoolExecutor(threads)

    def read(self) -> None:
        """Read all bytes `repeats(size)` times; the kernels take turns from call to call."""
        kernel = next(self._kernels)
        for _ in self._pool.map(lambda part: self._read(kernel, part), self._parts):
            pass

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _read(self, kernel: Kernel, part: NDArray[np.float32]) -> None:
        for _ in self._repeats:
            kernel(part)


def plain_passes(seconds: Sequence[float]) -> Sequence[float]:
    """Those of all passes, in order from the first, that read from one end to the other."""
    return seconds[KERNELS.index(_along) :: len(KERNELS)]


def _down(part: NDArray[np.float32]) -> object:
    return np.ones(part.shape[0], np.float32) @ part


def _across(part: NDArray[np.float32]) -> object:
    return part @ np.ones(part.shape[1], np.float32)


def _along(part: NDArray[np.float32]) -> object:
    return np.max(part)


KERNELS: tuple[Kernel, ...] = (_down, _across, _along)
