"""Rows that come, grow, move and leave, beside what a plain list says that they hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, DecodingRow, DirtySlots
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager, KVCacheManager
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.arrangements import arrangements

Row = list[NDArray[Any]]
PAGE = 16
SPOILED = 5
"""Slots behind the filled ones of a row that are not finite when it leaves its place."""


class House:
    """Caches, and for each place what its row holds: [heads, length, head_dim] a buffer."""

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        device: Device,
        read: Callable[[Tensor], NDArray[Any]],
    ) -> None:
        self.caches = HybridCacheManager(config, device)
        self.limit = config.max_supported_batch_size
        self._read = read
        first = self._buffers[0]
        shape = (2, len(self._buffers), first.shape[1], PAGE, first.shape[3])
        self._pool = device.zeros("pages", shape, first.dtype)
        self._page = np.zeros(shape[1:], first.dtype)
        self._rows: list[Row] = []
        self._count = 0

    def grow(self, place: int, slots: int) -> None:
        """Append slots to the row at `place`, each element another number."""
        caches, row = self.caches, self._rows[place]
        length = caches.row_lengths[place] + slots
        if length > caches.kv.capacity:
            return
        caches.reserve(length)
        for number, known in enumerate(row):
            heads, _, size = known.shape
            self._count += 1
            new = np.full((heads, slots, size), self._count % 2000, known.dtype)
            row[number] = np.concatenate([known, new], axis=1)
        caches.kv.restore(place, row)
        caches.commit([slots], place)
        # What a row holds now is what another one comes with.
        kept = min(PAGE, length)
        caches.kv.save(self._pool, [PageCopy(0, 0, place, length - kept, kept)])
        self._page[:, :, :kept] = [one[:, length - kept :] for one in row]

    def arrange(self, reorder: BatchReorder) -> None:
        """Let rows move over slots that are not finite behind each that leaves its place."""
        caches, lengths = self.caches, list(self.caches.row_lengths)
        kept = {place for place in range(len(lengths)) if place < reorder.rows}
        kept -= {move[0] for move in reorder.moves} | {place for place, _ in reorder.assignments}
        kept -= {move[1] for move in reorder.moves}
        settled = reorder.settle(lengths, lambda row: row.filled)
        # A prefix comes into slots that are zeroed: the bucket may grow before it does.
        moved = reorder.settle(lengths, lambda _: 0)
        bucket, stale = caches.kv.bucket, []
        for place in set(range(len(lengths))) - kept:
            begin, end = lengths[place], min(lengths[place] + SPOILED, bucket)
            self._spoil(place, end)
            filled = moved[place] if place < len(moved) else 0
            stale.append(DirtySlots(place, max(begin, filled), end))
        caches.reorder(reorder._replace(stale=stale))
        for place, row in reorder.assignments:
            caches.kv.load(self._pool, _pages_of(place, row.filled))
        self._rows = reorder.settle(self._rows, self._assign)
        assert caches.row_lengths == settled
        longest = max(settled, default=0)
        fitting = [size for size in caches.kv.buckets if 4 * longest <= 3 * size]
        least = min(size for size in caches.kv.buckets if size >= longest)
        assert caches.kv.bucket == min([max(bucket, least), *fitting])

    def check(self) -> None:
        """Every row holds what it should, and no slot of any place is not finite."""
        caches = self.caches
        lengths = [row[0].shape[1] for row in self._rows]
        assert caches.row_lengths == lengths
        every = lengths + [0] * (self.limit - len(lengths))
        assert self._read(caches.lengths).tolist() == every
        for place, row in enumerate(self._rows):
            got = caches.capture(place, lengths[place]).attention
            assert all(np.array_equal(*pair) for pair in zip(got, row, strict=True))
        assert all(caches.finite(place) for place in range(self.limit))

    def _assign(self, row: DecodingRow) -> Row:
        count = -(-row.filled // PAGE)
        return [np.tile(one, (1, count, 1))[:, : row.filled] for one in self._page]

    def _spoil(self, place: int, end: int) -> None:
        row = self._rows[place]
        bad = [np.full((one.shape[0], end, one.shape[2]), np.nan, one.dtype) for one in row]
        for array, known in zip(bad, row, strict=True):
            array[:, : known.shape[1]] = known
        self.caches.kv.restore(place, bad)

    @property
    def _buffers(self) -> tuple[Tensor, ...]:
        return self.caches.kv.keys + self.caches.kv.values


def _pages_of(place: int, filled: int) -> list[PageCopy]:
    return [
        PageCopy(0, 0, place, slot, min(PAGE, filled - slot)) for slot in range(0, filled, PAGE)
    ]


def live(house: House, data: st.DataObject, longest: int) -> None:
    """A life of a house: at each border rows are arranged anew, then some of them grow."""
    for _ in range(data.draw(st.integers(1, 6))):
        lengths = house.caches.row_lengths
        house.arrange(data.draw(arrangements(lengths, house.limit, longest)))
        house.check()
        for place in range(house.caches.batch):
            slots = data.draw(st.integers(0, longest))
            if slots:
                house.grow(place, slots)
        house.check()


def cache_view(cache: KVCacheManager, tensor: Tensor, rows: int) -> NDArray[Any]:
    """The first `rows` of a cache on the host as [rows, kv_heads, bucket, head_dim]."""
    _, heads, _, head_dim = tensor.shape
    return tensor.view((rows, heads, cache.bucket, head_dim))
