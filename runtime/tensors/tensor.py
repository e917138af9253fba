from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.cpu import allocate, dense_view
from runtime.errors import HearthError


class Tensor:
    """A named buffer with a fixed address; `array` has the shape of its allocation.

    A step sees the first elements of the buffer as a dense array of the step's shape.
    """

    __slots__ = ("_flat", "_view", "address", "array", "dtype", "name", "shape")

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        if not array.flags.c_contiguous:
            raise HearthError("internal", f"the buffer of {name} is not contiguous", name)
        self.name = name
        self.array = array
        self.dtype: np.dtype[Any] = array.dtype
        self.shape: tuple[int, ...] = array.shape
        self.address: int = array.__array_interface__["data"][0]
        self._flat = array.reshape(-1)
        self._view = array

    @classmethod
    def zeros(cls, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> "Tensor":
        """Allocate a zeroed tensor."""
        return cls(name, allocate(prod(shape), dtype).reshape(shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return int(self.array.nbytes)

    def view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """The buffer's first elements as `shape`; raises `internal` when it is too small."""
        # Decode steps ask for one shape again and again.
        if self._view.shape == shape:
            return self._view
        if prod(shape) > self._flat.size:
            raise HearthError(
                "internal",
                f"a step asks {self.name} for shape {shape}; its buffer has {self.shape}",
                self.name,
            )
        self._view = dense_view(self._flat, shape)
        return self._view
