"""Interface of the memory of keys and values."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import RowMove
from hearth.runtime.errors import HearthError
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.tensor import Tensor


class CacheStorage(Protocol):
    """The K/V buffers of all layers, keys and values alike, as dense [rows, heads, slots, D]."""

    def write(
        self,
        fresh: Sequence[Tensor],
        start: Tensor,
        shape: tuple[int, int, int],
        first: int = 0,
    ) -> None:
        """Classic dialect: put new rows, one tensor [B, heads, S, D] a buffer, from `start` on.

        `shape` is (B, S, slots). Row i of the new rows and of `start` goes to place `first` + i.
        """

    def commit_path(self, nodes: NDArray[np.int32], starts: Sequence[int], slots: int) -> None:
        """Move slot `starts[b] + nodes[b, i]` to `starts[b] + i` in every buffer.

        `nodes` [rows, n] ascends along a row; negative entries end it.
        """

    def move(self, moves: Sequence[RowMove], slots: tuple[int, int]) -> None:
        """Apply `move_rows` to every buffer, from the first to the second number of slots.

        No source is an earlier target.
        """

    def zero(self, row: int, begin: int, end: int, slots: int) -> None:
        """Zero the slots from `begin` to `end` of a row, in every buffer."""

    def save(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy slots of rows into pages of `pool` [pages, buffers, heads, tokens of a page, D].

        The pool may be host memory that `Device.host_zeros` gave.
        """

    def load(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy tokens of pages into cache slots of rows; the inverse of `save`."""

    def read_row(self, row: int, length: int, slots: int) -> list[NDArray[Any]]:
        """Copies of the first slots of a row, [heads, length, D] a buffer, on the host."""

    def write_row(self, row: int, arrays: Sequence[NDArray[Any]], slots: int) -> None:
        """The inverse of `read_row`."""


def check_pages(
    pool: Tensor, buffers: Sequence[Tensor], copies: Sequence[PageCopy], rows: int, slots: int
) -> None:
    """Raise `internal` if a pool has another shape, or a copy lies outside of pool or row."""
    first = buffers[0]
    pages, *shape = pool.shape
    _, heads, _, head_dim = first.shape
    fits = shape == [len(buffers), heads, shape[2], head_dim] and pool.dtype == first.dtype
    for page, offset, row, slot, tokens in copies:
        inside = 0 <= page < pages and 0 <= offset <= offset + tokens <= shape[2]
        fits = fits and inside and 0 <= row < rows and 0 <= slot <= slot + tokens <= slots
    if not fits:
        raise HearthError("internal", f"{pool.name} has no room for {list(copies)}", pool.name)
