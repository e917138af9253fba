import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from tests.runtime.arrangements import keep
from tests.runtime.caches.views import cache_view

CONFIG = simulated_config(layers=2, max_batch=4, capacity=1024)


def _started(lengths: list[int]) -> HybridCacheManager:
    caches = HybridCacheManager(CONFIG, CpuDevice())
    caches.reset(len(lengths))
    caches.reserve(max(lengths))
    caches.commit(lengths)
    for row in range(len(lengths)):
        for tensor in caches.kv.keys + caches.kv.values:
            cache_view(caches.kv, tensor, row + 1)[row, :, : lengths[row]] = row + 1
    return caches


def test_the_lengths_are_the_bound_start_indices() -> None:
    caches = _started([5, 9])
    assert caches.lengths.name == "kvcache_start_index"
    assert caches.lengths.dtype == np.int64
    assert caches.lengths.array.tolist() == [5, 9, 0, 0]
    caches.commit([1])
    caches.commit([4], 1)
    assert caches.lengths.array.tolist() == [6, 13, 0, 0]
    assert caches.row_lengths == [6, 13]


def test_a_decode_advances_the_first_rows() -> None:
    caches = _started([5, 9, 7])
    caches.advance(2)
    assert caches.lengths.array.tolist() == [6, 10, 7, 0]
    assert caches.row_lengths == [6, 10, 7]


def test_classic_engines_count_in_short_integers() -> None:
    caches = HybridCacheManager(structs.replace(CONFIG, dialect="classic"), CpuDevice())
    assert caches.lengths.dtype == np.int32


def test_a_new_batch_is_empty() -> None:
    caches = _started([600])
    before = (caches.row_lengths, caches.batch, caches.kv.bucket)
    caches.reset(2)
    assert before == ([600], 1, 768)
    assert (caches.row_lengths, caches.batch, caches.kv.bucket) == ([0, 0], 2, 256)


@pytest.mark.parametrize("batch", [-1, 5])
def test_a_batch_beyond_the_cache_is_refused(batch: int) -> None:
    with pytest.raises(HearthError, match="1 to 4 rows"):
        HybridCacheManager(CONFIG, CpuDevice()).reset(batch)


def test_layers_are_found_by_their_absolute_number() -> None:
    caches = HybridCacheManager(CONFIG, CpuDevice())
    keys, values = caches.attention_layer(1)
    assert (keys.name, values.name) == ("k_cache_1", "v_cache_1")
    with pytest.raises(HearthError, match="decoder layer 2"):
        caches.attention_layer(2)


def test_growth_keeps_what_live_rows_hold() -> None:
    caches = _started([5, 250])
    caches.reserve(257)
    view = cache_view(caches.kv, caches.kv.values[1], 2)
    assert caches.kv.bucket == 384
    assert (view[0, :, :5] == 1).all()
    assert (view[1, :, :250] == 2).all()


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=4))
def test_eviction_keeps_the_order_and_contents_of_the_rows_that_stay(
    rows: list[tuple[int, bool]],
) -> None:
    caches = _started([length for length, _ in rows])
    kept = [row for row, (_, stays) in enumerate(rows) if stays]
    caches.reorder(keep(*kept))
    assert caches.row_lengths == [rows[row][0] for row in kept]
    assert caches.lengths.array[len(kept) :].tolist() == [0] * (4 - len(kept))
    for place, row in enumerate(kept):
        for tensor in caches.attention_layer(0):
            assert (cache_view(caches.kv, tensor, 4)[place, :, : rows[row][0]] == row + 1).all()


def test_a_row_continues_after_a_restored_prefix() -> None:
    caches = _started([30, 40])
    prefix = caches.capture(1, 35)
    caches.reset(3)
    caches.restore(2, prefix)
    assert caches.row_lengths == [0, 0, 35]
    assert caches.lengths.array.tolist() == [0, 0, 35, 0]
    assert (cache_view(caches.kv, caches.kv.keys[0], 3)[2, :, :35] == 2).all()


def test_a_prefix_beyond_the_smallest_bucket_is_restored() -> None:
    caches = _started([600, 40])
    prefix = caches.capture(0, 550)
    caches.reset(2)
    caches.commit([30, 0])
    caches.restore(1, prefix)
    assert (caches.row_lengths, caches.kv.bucket) == ([30, 550], 768)
    view = cache_view(caches.kv, caches.kv.keys[0], 2)
    assert (view[0, :, :30] == 1).all()
    assert (view[1, :, :550] == 1).all()


def test_zeroing_reaches_every_layer() -> None:
    caches = _started([3, 4])
    caches.zero_row(0)
    for tensor in caches.kv.keys + caches.kv.values:
        assert not cache_view(caches.kv, tensor, 1).any()
        assert (cache_view(caches.kv, tensor, 2)[1, :, :4] == 2).all()
