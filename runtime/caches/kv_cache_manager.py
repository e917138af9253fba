from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from runtime.caches.buckets import bucket_for, bucket_sizes
from runtime.config import LLMEngineRunnerConfig
from runtime.device.cpu import RowMove, move_rows
from runtime.device.dtypes import numpy_dtype
from runtime.errors import HearthError
from runtime.tensors.tensor import Tensor


class LayerPrefix(NamedTuple):
    """The first slots of one row in one layer: keys and values [kv_heads, length, head_dim]."""

    keys: NDArray[Any]
    values: NDArray[Any]


class KVCacheManager:
    """Keys and values of all attention layers, by their index among attention layers.

    One zeroed allocation per layer and kind, large enough for every row at full capacity. It is
    used through a dense view [rows, kv_heads, bucket, head_dim]; changing the bucket re-lays the
    rows inside the allocation, so addresses stay and memory beyond the bucket stays uncommitted.
    """

    def __init__(self, config: LLMEngineRunnerConfig) -> None:
        self.capacity = config.max_kv_cache_capacity
        self.bucket = bucket_sizes(self.capacity)[0]
        self._heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._rows = config.max_supported_batch_size
        shape = (self._rows, self._heads, self.capacity, self._head_dim)
        dtype = numpy_dtype(config.kv_cache_dtype)
        layers = range(config.num_attention_layers)
        self.keys = tuple(Tensor.zeros(f"k_cache_{i}", shape, dtype) for i in layers)
        self.values = tuple(Tensor.zeros(f"v_cache_{i}", shape, dtype) for i in layers)

    def view(self, tensor: Tensor, rows: int) -> NDArray[Any]:
        """The first `rows` of a cache as [rows, kv_heads, bucket, head_dim]."""
        return tensor.view((rows, self._heads, self.bucket, self._head_dim))

    def reserve(self, slots: int, lengths: Sequence[int]) -> None:
        """Grow the bucket until a row has `slots`, keeping `lengths[row]` slots of each row.

        Raises `capacity_exceeded` beyond the capacity.
        """
        if slots <= self.bucket:
            return
        bucket = bucket_for(slots, self.capacity)
        self._move([RowMove(row, row, used) for row, used in enumerate(lengths)], bucket)

    def compact(self, moves: Sequence[RowMove]) -> None:
        """Move the rows that stay to their new places; only their used slots are copied."""
        self._move(moves, self.bucket)

    def restart(self) -> None:
        """Begin an empty batch in the smallest bucket; old contents stay, finite and unseen."""
        self.bucket = bucket_sizes(self.capacity)[0]

    def zero_row(self, row: int) -> None:
        """Zero all slots of a row that may hold non-finite numbers.

        A masked slot still spreads them: nothing times infinity is not a number.
        """
        for tensor in self._tensors:
            self.view(tensor, row + 1)[row] = 0

    def capture(self, row: int, length: int) -> list[LayerPrefix]:
        """Copy the first `length` slots of a row, layer by layer."""
        self._check(row, length)
        return [
            LayerPrefix(
                self.view(keys, row + 1)[row, :, :length].copy(),
                self.view(values, row + 1)[row, :, :length].copy(),
            )
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def restore(self, row: int, prefix: Sequence[LayerPrefix]) -> None:
        """Write a captured prefix into the first slots of a row."""
        for index, layer in enumerate(prefix):
            length = layer.keys.shape[1]
            self._check(row, length)
            self.view(self.keys[index], row + 1)[row, :, :length] = layer.keys
            self.view(self.values[index], row + 1)[row, :, :length] = layer.values

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.keys + self.values

    def _move(self, moves: Sequence[RowMove], bucket: int) -> None:
        slots = (self.bucket, bucket)
        for tensor in self._tensors:
            move_rows(tensor.array.reshape(-1), moves, self._heads, self._head_dim, slots)
        self.bucket = bucket

    def _check(self, row: int, length: int) -> None:
        if not (0 <= row < self._rows and 0 <= length <= self.bucket):
            raise HearthError("internal", f"row {row} has no {length} slots in the cache", "row")
