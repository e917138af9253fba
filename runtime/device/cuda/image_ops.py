import ctypes
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda.launch import KernelLaunch, addresses, integers
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.cuda.upload import UploadRing
from runtime.device.image_ops import RotaryTables, check_splice
from runtime.errors import HearthError
from runtime.pictures.positions import RowPositions
from runtime.tensors.tensor import Tensor

_THREADS = 64
_RING_SLOTS, _RING_BYTES = 8, 1 << 20
"""A chunk has a megabyte of embeddings and more: they get pinned memory of their own."""


class RotaryArguments(ctypes.Structure):
    """`Rotary` of csrc/step/rotary.cu."""

    _fields_ = (
        *addresses("cos_of sin_of axes positions cos sin"),
        *integers("pairs last length delta"),
    )


class CudaImageOps:
    """Copies embeddings to where a step reads them, and fills rotary tables by a kernel."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, ring: UploadRing) -> None:
        self._library, self._memory, self._ring = library, memory, ring
        self._stream = library.stream
        self._embeddings = UploadRing(
            library.context, memory, library.stream, _RING_SLOTS, _RING_BYTES
        )
        self._rotary: dict[RotaryTables, tuple[Tensor, KernelLaunch]] = {}

    def splice(self, target: Tensor, place: int, rows: NDArray[Any]) -> None:
        """Copy `rows` over those from `place` on."""
        check_splice(target, place, rows)
        first = place * target.shape[-1] * rows.itemsize
        self._embeddings.upload(target.address + first, rows)

    def clear(self, target: Tensor, places: int) -> None:
        """Zero the first rows of a buffer."""
        shape = (places, target.shape[-1])
        target.check(shape)
        self._stream.zero(target.address, prod(shape) * target.dtype.itemsize)

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        """Fill cosine and sine of a row."""
        _, slots, pairs = tables.cos.shape
        prompt, delta = positions
        if prompt.shape[1] > slots:
            raise HearthError("internal", f"{prompt.shape[1]} positions in {slots} slots")
        made = self._rotary.get(tables)
        if made is None:
            made = self._rotary[tables] = self._prepare(tables)
        places, launch = made
        self._ring.upload(places.address, prompt)
        arguments = launch.arguments[0]
        first = row * slots * pairs * tables.cos.dtype.itemsize
        arguments.cos, arguments.sin = tables.cos.address + first, tables.sin.address + first
        arguments.length, arguments.delta = prompt.shape[1], delta
        launch.launch(slots)

    def _prepare(self, tables: RotaryTables) -> tuple[Tensor, KernelLaunch]:
        _, slots, pairs = tables.cos.shape
        places = self._memory.zeros("prompt positions", (3, slots), np.dtype(np.int32))
        arguments = RotaryArguments(
            tables.cos_of.address,
            tables.sin_of.address,
            tables.axes.address,
            places.address,
            pairs=pairs,
            last=tables.cos_of.shape[0] - 1,
        )
        return places, self._library.prepare(
            "step/rotary", "fill_rotary", (), _THREADS, (arguments,)
        )
