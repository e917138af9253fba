import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.undo import undoing

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """`nbytes`, at least 1, rounded up to whole units of 256 bytes."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Arena:
    """Addresses from few large allocations, all freed together.

    `allocate` gets bytes and returns an address, `free` gives it back. The first `reserve` bytes
    come in one allocation, which is made at once; the rest of a full allocation is not used.
    """

    def __init__(
        self,
        allocate: Callable[[int], int],
        free: Callable[[int], None],
        chunk: int,
        reserve: int = 0,
    ) -> None:
        self._allocate, self._free = allocate, free
        self._chunk = aligned(chunk)
        self._chunks: list[int] = []
        self._next = self._end = 0
        self.allocated = 0
        """Bytes taken from the device."""
        self.used = 0
        """Bytes handed out, rounding included."""
        if reserve:
            self._grow(aligned(reserve))

    def take(self, nbytes: int) -> int:
        """The address of `nbytes`, 256-byte aligned."""
        size = aligned(nbytes)
        # A large tensor gets an allocation of its own, so that no rest of a chunk is lost.
        if size > self._end - self._next and size >= self._chunk:
            self.used += size
            return self._add_chunk(size)
        if size > self._end - self._next:
            self._grow(self._chunk)
        address = self._next
        self._next += size
        self.used += size
        return address

    @property
    def left(self) -> int:
        """Bytes of the newest chunk that were not handed out."""
        return self._end - self._next

    def close(self) -> None:
        """Free everything; calling it twice is harmless."""
        chunks, self._chunks = self._chunks, []
        self._next = self._end = self.allocated = self.used = 0
        with ExitStack() as closing:
            for chunk in chunks:
                closing.callback(self._free, chunk)

    def _grow(self, size: int) -> None:
        self._next = self._add_chunk(size)
        self._end = self._next + size

    def _add_chunk(self, size: int) -> int:
        address = self._allocate(size)
        self._chunks.append(address)
        self.allocated += size
        return address


class CudaMemory:
    """The device's and the pinned memory of one user, zeroed, freed together by `close`.

    `reserve` bytes of device memory are taken at once; more comes in chunks of `chunk` bytes.
    """

    def __init__(
        self, context: CudaContext, reserve: int = 0, chunk: int = 32 << 20, pinned: int = 1 << 20
    ) -> None:
        self._driver = context.driver
        self.device = Arena(self._device_chunk, self._free_device, chunk, reserve)
        self.pinned = Arena(self._pinned_chunk, self._free_pinned, pinned)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed device memory; raises `out_of_memory` with the tensor's name and bytes."""
        address = self._take(self.device, name, shape, dtype)
        return Tensor.on_device(name, address, shape, dtype, self)

    def pinned_zeros(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Zeroed pinned host memory, at the same address for the host and for the device."""
        address = self._take(self.pinned, name, shape, dtype)
        return Tensor(name, host_array(address, shape, dtype), self)

    def close(self) -> None:
        """Free all; arrays of pinned tensors must not be used afterwards."""
        with ExitStack() as closing:
            closing.callback(self.pinned.close)
            closing.callback(self.device.close)

    def _take(self, arena: Arena, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        nbytes = prod(shape) * dtype.itemsize
        try:
            return arena.take(nbytes)
        except HearthError as error:
            if error.code != "out_of_memory":
                raise
            raise HearthError(
                "out_of_memory", f"no memory for {name}, {nbytes} bytes: {error.message}", name
            ) from error

    def _device_chunk(self, size: int) -> int:
        address = int(self._driver.call("cuMemAlloc", size))
        with undoing() as undo:
            undo.callback(self._free_device, address)
            self._driver.call("cuMemsetD8", address, 0, size)
            # Our stream does not wait for the default stream, on which memory is set.
            self._driver.call("cuCtxSynchronize")
        return address

    def _free_device(self, address: int) -> None:
        self._driver.call("cuMemFree", address)

    def _pinned_chunk(self, size: int) -> int:
        api = self._driver.api
        flags = api.CU_MEMHOSTALLOC_PORTABLE | api.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self._driver.call("cuMemHostAlloc", size, flags))
        ctypes.memset(address, 0, size)
        return address

    def _free_pinned(self, address: int) -> None:
        self._driver.call("cuMemFreeHost", address)


def host_array(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Host memory at `address` as an array; the owner of the memory must outlive it."""
    nbytes = prod(shape) * dtype.itemsize
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    array: NDArray[Any] = np.ctypeslib.as_array(buffer)
    return array.view(dtype).reshape(shape)
