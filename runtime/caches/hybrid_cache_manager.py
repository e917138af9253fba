from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.arrangement import Arrangement, RowMove
from runtime.caches.kv_cache_manager import KVCacheManager
from runtime.caches.rotary_rows import RotaryRows
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device
from runtime.errors import HearthError
from runtime.pictures.positions import PLAIN, RowPositions
from runtime.tensors.registry import index_dtype
from runtime.tensors.tensor import Tensor


class RowPrefix(NamedTuple):
    """What one row has in all caches after its first `length` tokens, and where they stand."""

    length: int
    attention: list[NDArray[Any]]
    positions: RowPositions = PLAIN


class HybridCacheManager:
    """All caches of one engine, the lengths of its rows and the size of its batch.

    `lengths` [max batch] is the buffer that the engine reads as `kvcache_start_index`: committing
    tokens here is all that the next step needs. `row_lengths` are the same numbers on the host,
    so that nothing waits for the device. Rows always have the first `batch` places. `rotary` are
    the tables of each row, of an engine that has such.
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

    def rearrange(self, arrangement: Arrangement) -> None:
        """Let rows move with what they have here, which is `row_lengths`.

        New ones have as many slots as their seats say, which others fill. Stale slots are zeroed.
        There is room for the longest row; when it was one that left, the bucket may shrink.
        """
        lengths = arrangement.settle(self.row_lengths, lambda seat: seat.filled)
        self.kv.move(
            [
                RowMove(source, target, self.row_lengths[source])
                for source, target, _ in arrangement.moves
            ]
        )
        for stale in arrangement.stale:
            self.kv.zero(*stale)
        held = arrangement.settle(self.row_lengths, lambda _: 0)
        longest = max(lengths, default=0)
        self.kv.reserve(longest, held)
        self.kv.shrink(longest, held)
        self._set_lengths(lengths)

    def commit(self, added: Sequence[int], first: int = 0) -> None:
        """Count `added` new tokens in each of the rows from place `first` on."""
        self.count(added, first)
        self._ops.set_lengths(self.lengths, self.row_lengths)

    def count(self, added: Sequence[int], first: int = 0) -> None:
        """The same on the host alone, where the device knows, or is told with each step."""
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
        """Zero what lies behind the filled slots of a row."""
        self.kv.zero(row, self.row_lengths[row], self.kv.bucket)

    def finite(self, row: int) -> bool:
        """Whether all slots of a row hold finite numbers; waits for the device."""
        return all(np.isfinite(one).all() for one in self.kv.capture(row, self.kv.bucket))

    def capture(self, row: int, length: int) -> RowPrefix:
        """Copy what row `row` has after its first `length` tokens."""
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
