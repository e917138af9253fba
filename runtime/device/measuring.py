"""A device whose memory is counted by part and never taken."""

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import BatchSampler, SamplerBuffers
from hearth.runtime.tensors.tensor import Tensor

_PARTS = {
    "embedding": "embedding",
    "k_cache": "kv_cache",
    "v_cache": "kv_cache",
    "rope_cos": "rope",
    "rope_sin": "rope",
    "rope_cos_of": "rope",
    "rope_sin_of": "rope",
    "rope_axes": "rope",
    "zeros": "zeros",
    "adapter": "adapters",
    "adapter_slots": "adapters",
}
"""By the names of tensors, numbers at their ends left out."""


class _Inert:
    """Stub for an object that a constructor keeps and calls: every call does nothing."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Keep nothing."""

    def __call__(self, *_arguments: object, **_named: object) -> Any:
        """Do nothing."""
        return self

    def __getitem__(self, _key: object) -> Any:
        """Return the stub itself."""
        return self

    def __int__(self) -> int:
        """Return 0."""
        return 0

    def __rmul__(self, _factor: int) -> int:
        """Return 0, as the product."""
        return 0


def inert() -> Any:
    """Make a stub of the driver's side of a device."""
    return _Inert()


class MeasuringDevice(CpuDevice):
    """Device that counts the bytes of each allocation by part, and drops queued work.

    A tensor's name tells its part; a tensor without a part in its name belongs to the part that
    `begin` named last. `host_bytes` is the size of host memory that a GPU reads by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image_ops = inert()
        self.host_bytes = 0
        self._parts: defaultdict[str, int] = defaultdict(int)
        self._building, self._owner = "", ""

    def begin(self, building: str, owner: str = "") -> None:
        """Count coming tensors as `building`, or by parts whose names begin with `owner`."""
        self._building, self._owner = building, owner

    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return dict(self._parts)

    def count(self, name: str, nbytes: int) -> None:
        """Add bytes that are taken for a tensor of this name."""
        part = _PARTS.get(name.rstrip(" _0123456789"))
        self._parts[self._owner + part if part else self._building] += nbytes

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Count a tensor; its address is 0."""
        self.count(name, prod(shape) * dtype.itemsize)
        return Tensor.on_device(name, 0, shape, dtype, self)

    def host_zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Count host memory that the device reads."""
        tensor = Tensor.on_device(name, 0, shape, dtype, self)
        self.host_bytes += tensor.nbytes
        return tensor

    def constant(self, name: str, array: NDArray[Any]) -> Tensor:
        """Count a tensor as large as `array`, which is not read."""
        return self.zeros(name, array.shape, array.dtype)

    def constants(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Count each of many."""
        return {name: self.constant(name, array) for name, array in arrays.items()}

    def batch_sampler(self, _buffers: SamplerBuffers) -> BatchSampler:
        """A sampler that does nothing: on the CPU a sampler takes no device memory."""
        sampler: BatchSampler = inert()
        return sampler
