from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hearth.runtime.config import DeviceKind
from hearth.runtime.device.cache_storage import CacheStorage
from hearth.runtime.device.cuda.cuda_device import CudaImageOps
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.sampler import CudaBatchSampler
from hearth.runtime.device.cuda.storage import CudaCacheStorage
from hearth.runtime.device.device import BatchSampler, SamplerBuffers
from hearth.runtime.device.measuring import MeasuringDevice, inert
from hearth.runtime.tensors.tensor import Tensor

_UNIT = 2 << 20
"""Bytes in whose multiples a driver hands out memory."""


class MeasuringGpu(MeasuringDevice):
    """Arenas, sampler, cache storage and rotary tables as on a GPU, over no driver."""

    kind: DeviceKind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._inert = inert()
        self._memory = _CountedMemory(self._inert, self.count)
        self.image_ops = CudaImageOps(self._inert, self._memory, self._inert)

    def parts(self) -> dict[str, int]:
        """Bytes by part; the rest of the newest chunk counts as the part that was built last."""
        found = super().parts()
        found[self._building] = found.get(self._building, 0) + self._memory.device.left
        return found

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Count the bytes that the arena takes for a tensor."""
        return self._memory.zeros(name, shape, dtype)

    def cache_storage(self, buffers: Sequence[Tensor], heads: int, head_dim: int) -> CacheStorage:
        """Measure the cache storage of a GPU."""
        none = self._inert
        return CudaCacheStorage(none, self._memory, none, buffers, heads=heads, head_dim=head_dim)

    def batch_sampler(self, buffers: SamplerBuffers) -> BatchSampler:
        """Measure the sampler of a GPU."""
        return CudaBatchSampler(self._inert, self._memory, self._inert, buffers)


class _CountedMemory(CudaMemory):
    """Arenas of a GPU that report each tensor to `count`, and allocate nothing."""

    def __init__(self, context: Any, count: Callable[[str, int], None]) -> None:
        self._taken = 0
        self._count = count
        super().__init__(context)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Count a tensor, and the rest of a chunk that it does not fit into."""
        before = self._taken - self.device.left
        tensor = super().zeros(name, shape, dtype)
        self._count(name, self._taken - self.device.left - before)
        return tensor

    def pinned_zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Pageable memory, of which nothing is touched."""
        return Tensor.zeros(name, shape, dtype)

    def _device_chunk(self, size: int) -> int:
        self._taken += -(-size // _UNIT) * _UNIT
        return 0
