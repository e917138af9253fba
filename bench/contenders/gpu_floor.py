"""The memory-read floor of a GPU as a contender: the least time in which so much can be read.

A step takes one way of reading after the other: a streaming kernel of our own in some shapes over
two sizes of buffer, and where PyTorch is installed its matrix-vector product and its maximum, which
wait for memory alone as well. The fastest pass of all is the floor.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from hearth.bench.contenders.contender import Contender, Job
from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.cuda.launch import KernelLaunch, addresses
from hearth.runtime.device.cuda.programs import Program, Programs
from hearth.runtime.tensors.tensor import Tensor

Pass = Callable[[], object]
BLOCK = 256
PIECE = 16
SHARES = (8, 32)
"""A buffer has one of these shares of what a step reads, and is read as often."""
_COLUMNS = 8192
_PATTERN = 0x35


class Shape(NamedTuple):
    """Loads under way in a thread; blocks for each multiprocessor, 0 for one a tile."""

    unroll: int
    blocks: int


SHAPES = (Shape(4, 8), Shape(8, 8), Shape(4, 0), Shape(8, 0))


class _Arguments(ctypes.Structure):
    _fields_ = (*addresses("data nothing pieces"),)


class GPUFloor(Contender):
    """Reads `job.bytes` bytes a step; its tokens mean nothing.

    `job.bytes` is a multiple of 32 tiles of 32 KiB. On a CPU, for tests, PyTorch reads alone.
    """

    def __init__(self, job: Job) -> None:
        self._device = open_cuda_device() if job.device == "cuda" else None
        passes: list[Pass] = []
        if self._device is not None:
            self._kernels = Programs(
                self._device.context, self._device.library.compiler, __package__
            )
            for share in SHARES:
                data = _filled(self._device, job.bytes // share)
                kernels = self._device, self._kernels
                passes += [_own_pass(*kernels, shape, data, share) for shape in SHAPES]
        if self._device is None or find_spec("torch") is not None:
            passes += _torch_passes(job)
        self._passes: Iterator[Pass] = cycle(passes)
        self.count = len(passes)

    def step(self) -> int:
        """Read in the next way, and wait for the end."""
        next(self._passes)()
        return 0

    def close(self) -> None:
        """Free the buffers."""
        if self._device is not None:
            self._kernels.close()
            self._device.close()


def _filled(device: CudaDevice, size: int) -> Tensor:
    data = device.zeros("data", (size,), np.dtype(np.uint8))
    call, stream = device.context.driver.call, device.stream.native
    call("cuMemsetD8Async", data.address, _PATTERN, size, stream)
    return data


def _own_pass(
    device: CudaDevice, kernels: Programs, shape: Shape, data: Tensor, times: int
) -> Pass:
    nothing = device.zeros("nothing", (4,), np.dtype(np.uint8))
    options = (f"-DBLOCK={BLOCK}", f"-DUNROLL={shape.unroll}")
    function = kernels.function(Program("read", options=options), "read_once")
    arguments = [_Arguments(data.address, nothing.address, data.nbytes // PIECE)]
    launch = KernelLaunch(device.context, device.stream, function, BLOCK, arguments)
    tiles = data.nbytes // (PIECE * BLOCK * shape.unroll)
    blocks = min(tiles, shape.blocks * device.properties.multiprocessors or tiles)

    def read() -> None:
        for _ in range(times):
            launch.launch(blocks)
        device.stream.synchronize()

    return read


def _torch_passes(job: Job) -> list[Pass]:
    import torch  # noqa: PLC0415 - the other ways need none

    share = SHARES[-1]
    shape = (job.bytes // share // (torch.float16.itemsize * _COLUMNS), _COLUMNS)
    matrix = torch.ones(shape, dtype=torch.float16, device=job.device)
    vector = torch.ones(_COLUMNS, dtype=torch.float16, device=job.device)

    def read(kernel: Callable[[], Any]) -> None:
        for _ in range(share):
            found = kernel()
        found.ravel()[0].item()

    return [
        partial(read, partial(torch.mv, matrix, vector)),
        partial(read, partial(torch.amax, matrix, 1)),
    ]
