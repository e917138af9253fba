import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import DeviceKind
from hearth.runtime.device.cache_storage import CacheStorage
from hearth.runtime.device.cpu.ops import CpuBatchSampler, CpuCacheStorage, CpuImageOps, CpuStepOps
from hearth.runtime.device.cpu.tree_ops import CpuTreeOps
from hearth.runtime.device.device import (
    BatchSampler,
    HostStream,
    ImageOps,
    SamplerBuffers,
    StepOps,
    Stream,
    TreeOps,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor


def cpu_instructions() -> frozenset[str]:
    """Sets of instructions that the CPU here has, by the kernel's names; none if it is silent."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    names = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(names.partition(":")[2].split())


class HostEvent:
    """Event of the CPU, which has always been reached."""

    def query(self) -> bool:
        """Return True: all queued work has ended."""
        return True

    def wait(self) -> None:
        """Return at once."""


class HostSpan:
    """Wall time of the calling thread, from construction to `end`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: float | None = None

    def end(self) -> None:
        """End the span."""
        self.seconds = time.monotonic() - self._began


class CpuDevice:
    """Host memory and NumPy; a step has ended when the call that started it returns."""

    kind: DeviceKind = "cpu"
    steps_ahead = 0

    def __init__(self) -> None:
        self.stream: Stream = HostStream()
        self.ops: StepOps = CpuStepOps()
        self.tree_ops: TreeOps = CpuTreeOps()
        self.image_ops: ImageOps = CpuImageOps()

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed memory, committed when it is first written; raises `out_of_memory`."""
        try:
            return Tensor.zeros(name, shape, dtype)
        except MemoryError as error:
            raise HearthError(
                "out_of_memory", f"no memory for {name} of shape {shape}", name
            ) from error

    def host_zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed memory as of `zeros`: all memory is the host's."""
        return self.zeros(name, shape, dtype)

    def transfer(self, source: Tensor, target: Tensor) -> None:
        """Copy a buffer into another of the same size."""
        target.array[...] = source.view(target.shape)

    def constant(self, name: str, array: NDArray[Any]) -> Tensor:
        """The array itself."""
        return Tensor(name, array)

    def constants(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """The arrays themselves."""
        return {name: Tensor(name, array) for name, array in arrays.items()}

    def put(self, target: Tensor, array: NDArray[Any]) -> None:
        """Write an array into a buffer."""
        target.view(array.shape)[...] = array

    def copy(self, target: Tensor, source: Tensor | None) -> None:
        """Copy a buffer, or zeros."""
        target.array[...] = 0 if source is None else source.array

    def cache_storage(self, buffers: Sequence[Tensor], heads: int, head_dim: int) -> CacheStorage:
        """The storage of these K/V buffers, with its moves and writes."""
        return CpuCacheStorage(buffers, heads, head_dim)

    def batch_sampler(self, buffers: SamplerBuffers) -> BatchSampler:
        """A sampler over these buffers."""
        return CpuBatchSampler(buffers)

    def span(self) -> HostSpan:
        """A span that begins now."""
        return HostSpan()

    def record_event(self) -> "HostEvent":
        """Return an event that has been reached: all work has ended."""
        return HostEvent()

    def fetch(self, source: Tensor, out: NDArray[Any]) -> None:
        """Copy the beginning of a buffer."""
        out[...] = source.view(out.shape)

    def free_memory(self) -> int | None:
        """Return None: all memory is the host's."""
        return None

    def record(self, _work: Callable[[], None]) -> None:
        """Return None: no work is queued on the CPU."""

    def close(self) -> None:
        """Do nothing: arrays are freed with their last user."""
