from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.arrangement import RowMove
from runtime.device.cache_storage import check_pages
from runtime.reference.ops import PageCopy, copy_pages, move_rows, slot_index, write_rows
from runtime.reference.token_trees import commit_path, path_moves
from runtime.tensors.tensor import Tensor


class CpuCacheStorage:
    """The K/V buffers of all layers in host memory."""

    def __init__(self, buffers: Sequence[Tensor], heads: int, head_dim: int) -> None:
        self._buffers = tuple(buffers)
        self._heads = heads
        self._head_dim = head_dim

    def write(
        self,
        fresh: Sequence[Tensor],
        start: Tensor,
        shape: tuple[int, int, int],
        first: int = 0,
    ) -> None:
        """Put new rows [B, heads, S, D] from slot `start` on; `shape` is (B, S, slots)."""
        rows, width, slots = shape
        index = slot_index(start.array[:rows], self._heads, width)
        new = (rows, self._heads, width, self._head_dim)
        for cache, tensor in zip(self._buffers, fresh, strict=True):
            write_rows(self._view(cache, first + rows, slots)[first:], tensor.view(new), index)

    def commit_path(self, nodes: NDArray[np.int32], starts: Sequence[int], slots: int) -> None:
        """Move slot `starts[b] + nodes[b, i]` to `starts[b] + i` in every buffer."""
        moves = path_moves(nodes, np.array(starts), self._heads, slots)
        if moves.source.size:
            for tensor in self._buffers:
                commit_path(self._view(tensor, len(nodes), slots), moves)

    def move(self, moves: Sequence[RowMove], slots: tuple[int, int]) -> None:
        """Re-lay the rows of every buffer."""
        for tensor in self._buffers:
            move_rows(tensor.array.reshape(-1), moves, self._heads, self._head_dim, slots)

    def zero(self, row: int, begin: int, end: int, slots: int) -> None:
        """Zero these slots of a row in every buffer."""
        for tensor in self._buffers:
            self._view(tensor, row + 1, slots)[row, :, begin:end] = 0

    def save(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy slots of rows into pages."""
        self._copy_pages(pool, copies, slots, save=True)

    def load(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy pages into slots of rows."""
        self._copy_pages(pool, copies, slots, save=False)

    def read_row(self, row: int, length: int, slots: int) -> list[NDArray[Any]]:
        """Copies of a row's first slots, [heads, length, D] a buffer."""
        views = (self._view(tensor, row + 1, slots) for tensor in self._buffers)
        return [view[row, :, :length].copy() for view in views]

    def write_row(self, row: int, arrays: Sequence[NDArray[Any]], slots: int) -> None:
        """Write copies back into a row."""
        for tensor, array in zip(self._buffers, arrays, strict=True):
            self._view(tensor, row + 1, slots)[row, :, : array.shape[1]] = array

    def _copy_pages(
        self, pool: Tensor, copies: Sequence[PageCopy], slots: int, *, save: bool
    ) -> None:
        rows = self._buffers[0].shape[0]
        check_pages(pool, self._buffers, copies, rows, slots)
        for number, tensor in enumerate(self._buffers):
            copy_pages(pool.array[:, number], self._view(tensor, rows, slots), copies, save=save)

    def _view(self, tensor: Tensor, rows: int, slots: int) -> NDArray[Any]:
        return tensor.view((rows, self._heads, slots, self._head_dim))
