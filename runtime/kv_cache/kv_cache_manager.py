from collections.abc import Callable, Sequence
from math import gcd
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, DecodingRow, RowMove
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device, RotaryTables
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import PLAIN, RowPositions, pair_axes, row_positions
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.profiles import bucket_for, bucket_sizes
from hearth.runtime.tensors.registry import index_dtype
from hearth.runtime.tensors.tensor import Tensor, numpy_dtype

_ALIGNMENT = 256
"""Alignment in bytes of a binding's address on a GPU, also if the binding begins at a row."""


class KVCacheManager:
    """Keys and values of all attention layers, by their index among attention layers.

    Each layer and kind has one zeroed allocation, large enough for all rows at full capacity. It is
    used as a dense array [rows, kv_heads, bucket, head_dim]; a change of the bucket moves the rows
    inside the allocation, so addresses stay and memory beyond the bucket stays untouched.
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
        """The rows of a buffer from `first` on, in the bucket in use, as a step binds them."""
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

        It keeps `lengths[row]` slots of each row. A quarter is left, so it does not grow at once.
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
    """Raise `invalid_value` unless a binding may begin at any row of `capacity` cache slots."""
    if capacity * slot_bytes % _ALIGNMENT:
        raise HearthError(
            "invalid_value",
            f"rows of {capacity} cache slots begin at odd addresses on a GPU: take a capacity that "
            f"is a multiple of {_ALIGNMENT // gcd(_ALIGNMENT, slot_bytes)}",
            "capacity",
        )


class RotaryRows:
    """The rotary tables of an engine that has a table for each row, by the row's place.

    The numbers of a cache slot follow from the position of its token; in text that is the slot's
    index. So a row's table is filled anew when the row gets a place, and tables do not move.
    """

    def __init__(
        self, config: LLMEngineRunnerConfig, tables: dict[str, NDArray[Any]], device: Device
    ) -> None:
        batch, slots = config.max_supported_batch_size, config.max_kv_cache_capacity
        pairs, rope = config.rotary_dim // 2, config.rope_config
        if config.device == "cuda" and batch > 1:
            check_alignment(slots, pairs * 4)
        axes = pair_axes(rope.mrope_section, interleaved=rope.mrope_interleaved)
        cos_of, sin_of = (
            device.constant(f"rope_{name}_of", tables[name]) for name in ("cos", "sin")
        )
        cos, sin = (
            device.zeros(f"rope_{name}", (batch, slots, pairs), np.dtype(np.float32))
            for name in ("cos", "sin")
        )
        self._tables = RotaryTables(cos_of, sin_of, device.constant("rope_axes", axes), cos, sin)
        self._ops = device.image_ops
        self._rows: list[RowPositions] = []
        self._filled: list[RowPositions | None] = [None] * batch
        self.reset(batch)
        self.reset(0)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine [max batch, capacity, rotary_dim / 2], float32."""
        return self._tables.cos, self._tables.sin

    def reorder(self, reorder: BatchReorder) -> None:
        """Move the tables of each row to its new place."""
        self._rows = reorder.settle(self._rows, _positions)
        self._fill()

    def reset(self, batch: int) -> None:
        """Begin a batch of rows of text."""
        self._rows = [PLAIN] * batch
        self._fill()

    def positions(self, row: int, length: int) -> RowPositions:
        """Positions of the first `length` tokens of a row, and of text behind them."""
        prompt, delta = self._rows[row]
        if length >= prompt.shape[1]:
            return RowPositions(prompt, delta)
        kept = prompt[:, :length]
        return RowPositions(kept, int(kept.max(initial=-1)) + 1 - length)

    def place(self, row: int, positions: RowPositions) -> None:
        """Set the positions of a row's tokens from now on."""
        self._rows[row] = positions
        self._fill()

    def _fill(self) -> None:
        for place, positions in enumerate(self._rows):
            if self._filled[place] is not positions:
                self._ops.fill_rotary(self._tables, place, positions)
                self._filled[place] = positions


def _positions(row: DecodingRow) -> RowPositions:
    spans = [span for image in row.request.images for span in image.spans]
    return row_positions(row.prompt_length, spans)


class RowPrefix(NamedTuple):
    """State of one row in all caches after its first `length` tokens, with their positions."""

    length: int
    attention: list[NDArray[Any]]
    positions: RowPositions = PLAIN


class HybridCacheManager:
    """All caches of one engine, the lengths of its rows and the size of its batch.

    The name is that of the C++ runtime, whose manager routes to several kinds of cache; here `kv`
    is the only kind so far. `lengths` [max batch] is the buffer that the engine reads as
    `kvcache_start_index`: the next step needs nothing but tokens committed here. `row_lengths` has
    the same numbers on the host, so that no call waits for the device. Rows always have the first
    `batch` places. `rotary` has the tables of each row; None for an engine without such tables.
    """

    def __init__(self, config: LLMEngineRunnerConfig, device: Device) -> None:
        self.kv = KVCacheManager(config, device)
        self.rotary: RotaryRows | None = None
        shape = (config.max_supported_batch_size,)
        self.lengths = device.zeros("kvcache_start_index", shape, index_dtype(config))
        self._ops = device.ops
        self.row_lengths: list[int] = []

    def attention_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of decoder layer `layer`; raises `internal` when there is none."""
        if not 0 <= layer < len(self.kv.keys):
            raise HearthError("internal", f"decoder layer {layer} has no K/V cache", "layer")
        return self.kv.keys[layer], self.kv.values[layer]

    @property
    def batch(self) -> int:
        """The number of live rows."""
        return len(self.row_lengths)

    def reset(self, batch: int) -> None:
        """Begin a batch of empty rows; raises `invalid_value` when it is too large."""
        limit = self.lengths.shape[0]
        if not 0 <= batch <= limit:
            raise HearthError("invalid_value", f"a batch has 1 to {limit} rows", "rows")
        self._set_lengths([0] * batch)
        self.kv.restart()

    def reserve(self, slots: int) -> None:
        """Make room for `slots` tokens in every row, growing the bucket when it is needed."""
        if slots > self.kv.bucket:
            self.kv.reserve(slots, self.row_lengths)

    def reorder(
        self, reorder: BatchReorder, filled: Callable[[DecodingRow], int] = attrgetter("filled")
    ) -> None:
        """Move the slots and lengths of rows, and zero dirty slots.

        New rows have `filled` slots, which the prefix cache fills. The bucket holds the longest
        row, and may shrink when that left.
        """
        lengths = reorder.settle(self.row_lengths, filled)
        self.kv.move(
            [
                RowMove(source, target, self.row_lengths[source])
                for source, target, _ in reorder.moves
            ]
        )
        for stale in reorder.stale:
            self.kv.zero(*stale)
        held = reorder.settle(self.row_lengths, lambda _: 0)
        longest = max(lengths, default=0)
        self.kv.reserve(longest, held)
        self.kv.shrink(longest, held)
        self._set_lengths(lengths)

    def commit(self, added: Sequence[int], first: int = 0) -> None:
        """Count `added` new tokens in each of the rows from place `first` on."""
        self.count(added, first)
        self._ops.set_lengths(self.lengths, self.row_lengths)

    def count(self, added: Sequence[int], first: int = 0) -> None:
        """Count `added` tokens on the host only: other ops set the lengths on the device."""
        for row, tokens in enumerate(added, first):
            self.row_lengths[row] += tokens

    def commit_path(self, nodes: NDArray[np.int32]) -> None:
        """Move the slots of a tree's path to the end of each row; lengths do not grow by it.

        Slot length + `nodes[b, i]` becomes slot length + i; negative entries end a row.
        """
        self.kv.commit_path(nodes, self.row_lengths[: len(nodes)])

    def advance(self, rows: int) -> None:
        """Count one new token in each of the first `rows`."""
        for row in range(rows):
            self.row_lengths[row] += 1
        self._ops.advance(self.lengths, rows)

    def zero_row(self, row: int) -> None:
        """Zero the slots of a row that may hold non-finite numbers."""
        self.kv.zero(row, 0, self.kv.bucket)

    def zero_behind(self, row: int) -> None:
        """Zero the free cache slots of a row."""
        self.kv.zero(row, self.row_lengths[row], self.kv.bucket)

    def finite(self, row: int) -> bool:
        """Return True if all slots of a row hold finite numbers; waits for the device."""
        return all(np.isfinite(one).all() for one in self.kv.capture(row, self.kv.bucket))

    def capture(self, row: int, length: int) -> RowPrefix:
        """Copy the state of row `row` after its first `length` tokens."""
        positions = PLAIN if self.rotary is None else self.rotary.positions(row, length)
        return RowPrefix(length, self.kv.capture(row, length), positions)

    def restore(self, row: int, prefix: RowPrefix) -> None:
        """Let row `row` continue after a captured prefix, in a bucket with room for it."""
        self.reserve(prefix.length)
        self.kv.restore(row, prefix.attention)
        if self.rotary is not None:
            self.rotary.place(row, prefix.positions)
        self.row_lengths[row] = prefix.length
        self._set_lengths(self.row_lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self.row_lengths = lengths
        self._ops.set_lengths(self.lengths, lengths)
