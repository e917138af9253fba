from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.arrangement import RowMove
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.errors import HearthError
from runtime.reference.ops import PageCopy
from runtime.tensors.buckets import bucket_for, bucket_sizes
from runtime.tensors.dtypes import numpy_dtype
from runtime.tensors.tensor import Tensor

_ALIGNMENT = 256
"""Bytes to which the address of a binding on a GPU is aligned, also one that begins at a row."""


class KVCacheManager:
    """Keys and values of all attention layers, by their index among attention layers.

    One zeroed allocation per layer and kind, large enough for every row at full capacity. It is
    used as a dense array [rows, kv_heads, bucket, head_dim]; changing the bucket re-lays the
    rows inside the allocation, so addresses stay and memory beyond the bucket stays untouched.
    """

    def __init__(self, config: LLMEngineRunnerConfig, device: Device) -> None:
        self.capacity = config.max_kv_cache_capacity
        self.buckets = bucket_sizes(self.capacity, config.device)
        self.bucket = self.buckets[0]
        self._rows = config.max_supported_batch_size
        self._tree = max(config.max_verify_tree_size, config.max_draft_tree_size)
        shape = (self._rows, config.num_kv_heads, self.capacity, config.head_dim)
        dtype = numpy_dtype(config.kv_cache_dtype)
        if config.device == "cuda" and self._rows > 1:
            check_alignment(self.capacity, config.num_kv_heads * config.head_dim * dtype.itemsize)
        layers = range(config.num_attention_layers)
        self.keys = tuple(device.zeros(f"k_cache_{i}", shape, dtype) for i in layers)
        self.values = tuple(device.zeros(f"v_cache_{i}", shape, dtype) for i in layers)
        self._storage = device.cache_storage(
            self.keys + self.values, config.num_kv_heads, config.head_dim
        )

    def from_row(self, tensor: Tensor, first: int) -> Tensor:
        """The rows of a buffer from `first` on, in the bucket in use: what a step binds."""
        _, heads, _, head_dim = tensor.shape
        shape = (self._rows - first, heads, self.bucket, head_dim)
        return tensor.part(tensor.name, first * heads * self.bucket * head_dim, shape)

    def reserve(self, slots: int, lengths: Sequence[int]) -> None:
        """Grow the bucket until a row has `slots`, keeping `lengths[row]` slots of each row.

        Raises `capacity_exceeded` beyond the capacity.
        """
        if slots > self.bucket:
            self._lay(bucket_for(slots, self.buckets), lengths)

    def shrink(self, slots: int, lengths: Sequence[int]) -> None:
        """Take the smallest bucket of which `slots` fill at most three quarters, if it is smaller.

        It keeps `lengths[row]` slots of each row. With a quarter left nobody grows it at once.
        """
        bucket = next((size for size in self.buckets if 4 * slots <= 3 * size), self.bucket)
        if bucket < self.bucket:
            self._lay(bucket, lengths)

    def move(self, moves: Sequence[RowMove]) -> None:
        """Move rows to their new places; only their used slots are copied."""
        self._storage.move(moves, (self.bucket, self.bucket))

    def save(self, pool: Tensor, copies: Sequence[PageCopy]) -> None:
        """Copy slots of rows into pages of `pool` [pages, buffers, heads, page tokens, D]."""
        self._storage.save(pool, copies, self.bucket)

    def load(self, pool: Tensor, copies: Sequence[PageCopy]) -> None:
        """Copy pages into slots of rows."""
        self._storage.load(pool, copies, self.bucket)

    def write(
        self, fresh: Sequence[Tensor], start: Tensor, shape: tuple[int, int], first: int = 0
    ) -> None:
        """Put the new rows of a step, keys of all layers and then values, behind `start`.

        `shape` is rows and tokens of the step, whose row 0 is place `first`.
        """
        self._storage.write(fresh, start, (*shape, self.bucket), first)

    def commit_path(self, nodes: NDArray[np.int32], lengths: Sequence[int]) -> None:
        """Move slot `lengths[b] + nodes[b, i]` to `lengths[b] + i`; negative entries end a row."""
        self._storage.commit_path(nodes, lengths, self.bucket)

    def restart(self) -> None:
        """Begin an empty batch in the smallest bucket; old contents stay, finite and unseen."""
        self.bucket = self.buckets[0]

    def zero(self, row: int, begin: int, end: int) -> None:
        """Zero the slots from `begin` to `end` of a row, as far as there are any in the bucket.

        A masked slot spreads numbers that are not finite: nothing times infinity is not a number.
        """
        self._check(row, 0)
        end = min(end, self.bucket)
        if begin < end:
            self._storage.zero(row, begin, end, self.bucket)

    def _lay(self, bucket: int, lengths: Sequence[int]) -> None:
        moves = [RowMove(row, row, used) for row, used in enumerate(lengths)]
        for row, _, used in moves:
            # What a tree left there may not be finite, and another row gets this memory.
            self.zero(row, used, used + self._tree)
        self._storage.move(moves, (self.bucket, bucket))
        self.bucket = bucket

    def capture(self, row: int, length: int) -> list[NDArray[Any]]:
        """Copy the first `length` slots of a row: [kv_heads, length, head_dim] a buffer."""
        self._check(row, length)
        return self._storage.read_row(row, length, self.bucket)

    def restore(self, row: int, prefix: Sequence[NDArray[Any]]) -> None:
        """Write a captured prefix into the first slots of a row."""
        for array in prefix:
            self._check(row, array.shape[1])
        self._storage.write_row(row, prefix, self.bucket)

    def _check(self, row: int, length: int) -> None:
        if not (0 <= row < self._rows and 0 <= length <= self.bucket):
            raise HearthError("internal", f"row {row} has no {length} slots in the cache", "row")


def check_alignment(capacity: int, slot_bytes: int) -> None:
    """Raise `invalid_value` where rows of so many slots cannot be bound from any row on."""
    if capacity * slot_bytes % _ALIGNMENT:
        raise HearthError(
            "invalid_value",
            f"rows of {capacity} cache slots begin at odd addresses on a GPU: take a capacity that "
            f"is a multiple of {_ALIGNMENT // gcd(_ALIGNMENT, slot_bytes)}",
            "capacity",
        )
