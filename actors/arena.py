"""Shared memory of slots: the mapping, and the allocator of its slots."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.errors import HearthError
from hearth.runtime.images import Slot

HEAD_BYTES = 64
"""Bytes of a slot's header: a CPU cache line; offsets and lengths are multiples of it."""
_GENERATION = struct.Struct("<Q")
_FREE = 0
# Else a process that shortens the file would end all others with SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedArena(msgspec.Struct, frozen=True):
    """An arena in the settings of a process: the descriptor that it inherits, and the bytes."""

    descriptor: int
    size: int


class Arena:
    """A mapped memory file; `ArenaSlots` in the daemon's process allocates its slots.

    A slot's generation lies in a header before its data. A reader takes a `view`, and calls
    `check` afterwards to see that the slot was not reused meanwhile.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self._map = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size: int) -> Arena:
        """Create an arena of `size` bytes, which take memory as they are used.

        Raises `out_of_memory` if the system has none.
        """
        try:
            descriptor = os.memfd_create(f"hearth-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, size)
        except OSError as error:
            raise HearthError(
                "out_of_memory",
                f"the system gives no {size} bytes of shared memory for {name} "
                f"({os.strerror(error.errno or 0)})",
            ) from error

    @classmethod
    def open(cls, descriptor: int, size: int) -> Arena:
        """Map an inherited arena; raises `internal` if the descriptor has not `size` bytes."""
        try:
            return cls(descriptor, size)
        except (OSError, ValueError) as error:
            raise HearthError(
                "internal", f"descriptor {descriptor} is no memory of {size} bytes"
            ) from error

    @property
    def shared(self) -> SharedArena:
        """Descriptor and size, for the settings of a process that inherits the arena."""
        return SharedArena(self.descriptor, self.size)

    def slots(self) -> ArenaSlots:
        """Return an allocator of the slots; there is one, in the process that made the arena."""
        return ArenaSlots(self.size, self._mark)

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, to be read or written; raises `internal` if it has been reused."""
        self.check(slot)
        start = slot.offset + HEAD_BYTES
        return self._bytes[start : start + slot.size]

    def array(self, slot: Slot, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The slot's bytes as an array; raises `internal` as `view` does, and for another size."""
        view = self.view(slot)
        if len(view) != prod(shape) * dtype.itemsize:
            raise HearthError("internal", f"{len(view)} bytes are no {dtype} {shape}")
        return np.frombuffer(view, dtype).reshape(shape)

    def check(self, slot: Slot) -> None:
        """Raise `internal` if the slot has been freed or reused."""
        start, end = slot.offset, slot.offset + HEAD_BYTES + slot.size
        inside = start >= 0 and slot.size >= 0 and end <= self.size
        if not inside or _GENERATION.unpack_from(self._bytes, start) != (slot.generation,):
            raise HearthError("internal", "a piece of shared memory has been given to another")

    def close(self) -> None:
        """Close descriptor and mapping; views that are still in use keep the memory."""
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            # The mapping goes with the last view of it.
            return
        finally:
            os.close(self.descriptor)

    def _mark(self, offset: int, generation: int) -> None:
        _GENERATION.pack_into(self._bytes, offset, generation)


class _Piece(NamedTuple):
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class ArenaSlots:
    """First-fit allocator of an arena's slots; no I/O but `mark`, which writes a generation.

    First fit leaves what is seldom used at the end, where it takes no memory. A generation is
    never given twice.
    """

    def __init__(self, size: int, mark: Callable[[int, int], None] = lambda *_: None) -> None:
        self.size = size
        self.used = 0
        self._mark = mark
        self._generation = _FREE
        self._free = [_Piece(0, size - size % HEAD_BYTES)]
        self._taken: dict[int, _Piece] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size: int) -> Slot | None:
        """Allocate a slot of `size` bytes; None if no free piece is large enough now."""
        length = slot_bytes(size)
        for index, piece in enumerate(self._free):
            if piece.length < length:
                continue
            rest = _Piece(piece.offset + length, piece.length - length)
            self._free[index : index + 1] = [rest] if rest.length else []
            self._generation += 1
            self._taken[self._generation] = _Piece(piece.offset, length)
            self.used += length
            self._mark(piece.offset, self._generation)
            return Slot(piece.offset, size, self._generation)
        return None

    def free(self, slot: Slot) -> None:
        """Free a slot; a second time does nothing."""
        piece = self._taken.pop(slot.generation, None)
        if piece is None:
            return
        self._mark(piece.offset, _FREE)
        self.used -= piece.length
        at = bisect_left(self._free, piece)
        if at < len(self._free) and self._free[at].offset == piece.end:
            piece = _Piece(piece.offset, piece.length + self._free.pop(at).length)
        if at and self._free[at - 1].end == piece.offset:
            at -= 1
            piece = _Piece(self._free[at].offset, self._free.pop(at).length + piece.length)
        self._free.insert(at, piece)


def slot_bytes(size: int) -> int:
    """Bytes of its arena that a slot of `size` bytes takes."""
    return HEAD_BYTES + -(-size // HEAD_BYTES) * HEAD_BYTES
