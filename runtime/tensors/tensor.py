from collections.abc import Iterator
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.errors import HearthError

_NUMPY: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def numpy_dtype(name: DType) -> np.dtype[Any]:
    """The NumPy type of a configuration's element type."""
    return _NUMPY[name]


class Tensor:
    """A named buffer with a fixed address, in host or in device memory.

    A step sees the first elements of the buffer as a dense array of the step's shape. Only host
    memory (pageable or pinned) has an `array`; the memory of a device is reached by its ops.
    """

    __slots__ = ("_array", "_view", "address", "dtype", "name", "nbytes", "owner", "shape")

    def __init__(self, name: str, array: NDArray[Any], owner: object = None) -> None:
        if not array.flags.c_contiguous:
            raise HearthError("internal", f"the buffer of {name} is not contiguous", name)
        self.name = name
        self.dtype: np.dtype[Any] = array.dtype
        self.shape: tuple[int, ...] = array.shape
        self.nbytes = int(array.nbytes)
        self.address: int = array.__array_interface__["data"][0]
        self.owner = owner
        self._array: NDArray[Any] | None = array
        self._view = array

    @classmethod
    def zeros(cls, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> "Tensor":
        """Zeroed host memory; its pages are committed by the system when first written."""
        return cls(name, np.zeros(shape, dtype))

    @classmethod
    def on_device(
        cls, name: str, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> "Tensor":
        """Device memory at `address`, which lives as long as `owner`."""
        tensor = cls.__new__(cls)
        tensor.name, tensor.address, tensor.shape, tensor.dtype = name, address, shape, dtype
        tensor.nbytes = prod(shape) * dtype.itemsize
        tensor.owner = owner
        tensor._array = None  # noqa: SLF001 - of its own class
        return tensor

    def part(self, name: str, first: int, shape: tuple[int, ...]) -> "Tensor":
        """The elements from `first` on as a tensor of `shape`; raises `internal` beyond the end."""
        end = first + prod(shape)
        if end * self.dtype.itemsize > self.nbytes:
            raise HearthError("internal", f"{self.name} has no {end} elements", self.name)
        if self._array is not None:
            return Tensor(name, self._array.reshape(-1)[first:end].reshape(shape), self)
        address = self.address + first * self.dtype.itemsize
        return Tensor.on_device(name, address, shape, self.dtype, self)

    def beginning(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> "Tensor":
        """The first bytes as a tensor of `shape` and another type; raises `internal` beyond."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > self.nbytes:
            raise HearthError("internal", f"{self.name} has no {nbytes} bytes", self.name)
        if self._array is not None:
            first = self._array.reshape(-1).view(np.uint8)[:nbytes]
            return Tensor(name, first.view(dtype).reshape(shape), self)
        return Tensor.on_device(name, self.address, shape, dtype, self)

    def protect(self) -> None:
        """Make host memory read-only; that of a device has no such protection."""
        if self._array is not None:
            self._array.flags.writeable = False

    @property
    def array(self) -> NDArray[Any]:
        """The whole buffer in the shape of its allocation; raises `internal` off the host."""
        if self._array is None:
            raise HearthError("internal", f"{self.name} lies in device memory", self.name)
        return self._array

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise `internal` when a dense array of `shape` does not fit into the buffer."""
        if prod(shape) * self.dtype.itemsize > self.nbytes:
            raise HearthError(
                "internal",
                f"a step asks {self.name} for shape {shape}; its buffer has {self.shape}",
                self.name,
            )

    def view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """The first elements of host memory as `shape`; raises `internal` when it is too small."""
        array = self.array
        # Decode steps ask for one shape again and again.
        if self._view.shape == shape:
            return self._view
        self.check(shape)
        self._view = array.reshape(-1)[: prod(shape)].reshape(shape)
        return self._view


class TensorMap:
    """Binding name to tensor, without owning it.

    `epoch` grows whenever a binding gets another buffer, so that what was derived from the map
    (a prepared step) is known to be out of date. Two names may share one tensor: an output that
    is written in place of its input.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._tensors: dict[str, Tensor] = {}

    def set(self, binding: str, tensor: Tensor) -> None:
        """Let `binding` mean `tensor`."""
        known = self._tensors.get(binding)
        if known is None or _layout(known) != _layout(tensor):
            self.epoch += 1
        self._tensors[binding] = tensor

    def get(self, binding: str) -> Tensor:
        """The tensor of `binding`; raises `engine_incompatible` naming it when there is none."""
        tensor = self._tensors.get(binding)
        if tensor is None:
            raise HearthError(
                "engine_incompatible",
                f"the engine has a binding {binding} that this runtime does not know: "
                "export the model again",
                binding,
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.address, tensor.shape, tensor.dtype
