"""The memory-read floor as a contender: the least time in which the weights can be read once.

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

from hearth.bench.contenders.contender import Contender, Job

Kernel = Callable[[NDArray[np.float32]], object]
PASSES = 10
"""Passes by each kernel; the best of all is the floor."""
_COLUMNS = 4096
_LEAST_BYTES = 1 << 28


def repeats(size: int) -> int:
    """Number of times that a pass reads a buffer of `size` bytes.

    Small ones are read often: the time to wake the threads must not count as reading.
    """
    return max(1, _LEAST_BYTES // size)


class MemoryFloor(Contender):
    """Reads a buffer of `job.bytes` bytes, rounded to 16 KiB; its tokens mean nothing.

    The process must have started with the BLAS at one thread (`OPENBLAS_NUM_THREADS=1`):
    the `job.threads` threads here are the readers.
    """

    def __init__(self, job: Job) -> None:
        rows = max(job.threads, round(job.bytes / (4 * _COLUMNS)))
        self._repeats = range(repeats(job.bytes))
        self._parts = np.array_split(np.ones((rows, _COLUMNS), np.float32), job.threads)
        self._kernels = cycle(KERNELS)
        self._pool = ThreadPoolExecutor(job.threads)

    def step(self) -> int:
        """Read all bytes as often as `repeats` says; the kernels take turns from step to step."""
        kernel = next(self._kernels)
        for _ in self._pool.map(lambda part: self._read(kernel, part), self._parts):
            pass
        return 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _read(self, kernel: Kernel, part: NDArray[np.float32]) -> None:
        for _ in self._repeats:
            kernel(part)


def plain_passes(seconds: Sequence[float]) -> Sequence[float]:
    """Seconds of all passes, in order from the first, that read from one end to the other."""
    return seconds[KERNELS.index(_along) :: len(KERNELS)]


def _down(part: NDArray[np.float32]) -> object:
    return np.ones(part.shape[0], np.float32) @ part


def _across(part: NDArray[np.float32]) -> object:
    return part @ np.ones(part.shape[1], np.float32)


def _along(part: NDArray[np.float32]) -> object:
    return np.max(part)


KERNELS: tuple[Kernel, ...] = (_down, _across, _along)
