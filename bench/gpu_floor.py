"""The read bandwidth of a GPU: the fastest read of as many bytes as a decode step needs."""

from itertools import cycle
from typing import Any

import torch

from bench.gpu_floor_size import gpu_repeats
from bench.worker_messages import Job

_COLUMNS = 8192
_ITEM = 2


class GPUFloorModel:
    """Reads a float16 matrix of `job.bytes` bytes; its tokens mean nothing.

    A matrix-vector product and a maximum take turns: both only wait for memory.
    """

    precision = ""
    first = 0

    def __init__(self, job: Job) -> None:
        rows = max(1, job.bytes // (_ITEM * _COLUMNS))
        self._matrix = torch.ones((rows, _COLUMNS), dtype=torch.float16, device=job.device)
        self._vector = torch.ones(_COLUMNS, dtype=torch.float16, device=job.device)
        self._repeats = gpu_repeats(job.bytes) if job.device == "cuda" else 1
        self._kernels = cycle((self._product, self._largest))

    def step(self) -> int:
        """Read the buffer as often as `gpu_repeats` says, and wait for the end."""
        kernel = next(self._kernels)
        for _ in range(self._repeats):
            found = kernel()
        found.ravel()[0].item()
        return 0

    def _product(self) -> Any:
        return torch.mv(self._matrix, self._vector)

    def _largest(self) -> Any:
        return torch.amax(self._matrix, 1)
