import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import RowMove
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.kv_cache_manager import KVCacheManager
from tests.runtime.caches.views import cache_view

CONFIG = simulated_config(layers=2, max_batch=3, capacity=600)


def _filled(lengths: list[int]) -> KVCacheManager:
    """A cache whose row r holds r + 1 + layer / 10 in its first slots."""
    cache = KVCacheManager(CONFIG, CpuDevice())
    for layer, tensor in enumerate(cache.keys + cache.values):
        for row, length in enumerate(lengths):
            cache_view(cache, tensor, row + 1)[row, :, :length] = row + 1 + layer / 10
    return cache


def _assert_holds(cache: KVCacheManager, rows: list[tuple[int, int]]) -> None:
    """Row i of every cache holds what row `rows[i][0]` held, `rows[i][1]` slots of it."""
    for layer, tensor in enumerate(cache.keys + cache.values):
        view = cache_view(cache, tensor, len(rows))
        for row, (origin, length) in enumerate(rows):
            assert np.allclose(view[row, :, :length], origin + 1 + layer / 10)


def test_every_layer_and_kind_has_one_zeroed_allocation() -> None:
    cache = KVCacheManager(CONFIG, CpuDevice())
    assert len(cache.keys) == len(cache.values) == 2
    assert {tensor.shape for tensor in cache.keys + cache.values} == {(3, 1, 600, 2)}
    assert not any(tensor.array.any() for tensor in cache.keys + cache.values)
    assert cache_view(cache, cache.keys[0], 2).shape == (2, 1, 256, 2)


def test_growing_keeps_rows_and_addresses() -> None:
    cache = _filled([256, 10, 100])
    before = [tensor.address for tensor in cache.keys + cache.values]
    cache.reserve(257, [256, 10, 100])
    assert cache.bucket == 384
    _assert_holds(cache, [(0, 256), (1, 10), (2, 100)])
    cache.reserve(600, [256, 10, 100])
    assert cache.bucket == 600
    _assert_holds(cache, [(0, 256), (1, 10), (2, 100)])
    assert before == [tensor.address for tensor in cache.keys + cache.values]
    assert all(cache_view(cache, t, 1).ctypes.data == t.address for t in cache.keys)


def test_what_fits_does_not_grow() -> None:
    cache = KVCacheManager(CONFIG, CpuDevice())
    cache.reserve(256, [0])
    assert cache.bucket == 256


def test_growing_beyond_the_capacity_is_refused_and_changes_nothing() -> None:
    cache = _filled([5])
    with pytest.raises(HearthError, match="601 cache slots"):
        cache.reserve(601, [5])
    _assert_holds(cache, [(0, 5)])


def test_compaction_moves_rows_down() -> None:
    cache = _filled([7, 20, 30])
    cache.move([RowMove(1, 0, 20), RowMove(2, 1, 30)])
    _assert_holds(cache, [(1, 20), (2, 30)])


@pytest.mark.parametrize(
    ("longest", "bucket"),
    [(0, 256), (192, 256), (193, 384), (288, 384), (289, 512), (385, 600), (600, 600)],
)
def test_a_bucket_shrinks_to_one_with_a_quarter_left(longest: int, bucket: int) -> None:
    lengths = [min(longest, 100), 0, longest]
    cache = _filled([0, 0, 0])
    cache.reserve(600, [0, 0, 0])
    for tensor in cache.keys + cache.values:
        for row, length in enumerate(lengths):
            cache_view(cache, tensor, 3)[row, :, :length] = row
    cache.shrink(longest, lengths)
    assert cache.bucket == bucket
    for tensor in cache.keys + cache.values:
        for row, length in enumerate(lengths):
            assert (cache_view(cache, tensor, 3)[row, :, :length] == row).all()
    cache.shrink(0, [0, 0, 0])
    assert cache.bucket == 256


@pytest.mark.parametrize("grows", [True, False])
def test_what_a_tree_left_behind_reaches_no_other_row(*, grows: bool) -> None:
    cache = KVCacheManager(structs.replace(CONFIG, max_verify_tree_size=4), CpuDevice())
    if not grows:
        cache.reserve(512, [])
    for tensor in cache.keys + cache.values:
        cache_view(cache, tensor, 3)[:, :, 10:14] = np.nan
    if grows:
        cache.reserve(300, [10, 10, 10])
    else:
        cache.shrink(10, [10, 10, 10])
    assert all(np.isfinite(tensor.array).all() for tensor in cache.keys + cache.values)


def test_rows_that_begin_at_odd_addresses_are_refused_on_a_gpu() -> None:
    config = structs.replace(CONFIG, device="cuda")
    with pytest.raises(HearthError, match="a multiple of 32") as caught:
        KVCacheManager(config, CpuDevice())
    assert (caught.value.code, caught.value.field) == ("invalid_value", "capacity")
    for right in ({"max_kv_cache_capacity": 608}, {"max_supported_batch_size": 1}):
        KVCacheManager(structs.replace(config, **right), CpuDevice())


def test_a_restart_begins_in_the_smallest_bucket() -> None:
    cache = _filled([5])
    cache.reserve(500, [5])
    cache.restart()
    assert cache.bucket == 256


def test_a_poisoned_row_is_zeroed_alone() -> None:
    cache = _filled([10, 10, 10])
    for tensor in cache.keys + cache.values:
        cache_view(cache, tensor, 3)[1] = np.nan
    cache.zero(1, 0, cache.bucket)
    _assert_holds(cache, [(0, 10)])
    for tensor in cache.keys + cache.values:
        view = cache_view(cache, tensor, 3)
        assert not view[1].any()
        assert np.isfinite(tensor.array).all()
        assert view[2, :, :10].all()


def test_a_prefix_is_captured_as_a_copy_and_restored_elsewhere() -> None:
    cache = _filled([10, 20, 30])
    prefix = cache.capture(2, 12)
    cache.zero(2, 0, cache.bucket)
    cache.restore(0, prefix)
    _assert_holds(cache, [(2, 12), (1, 20)])
    assert [array.shape for array in prefix] == [(1, 12, 2)] * 4


@pytest.mark.parametrize(("row", "length"), [(3, 1), (-1, 1), (0, 257)])
def test_slots_outside_the_cache_are_refused(row: int, length: int) -> None:
    with pytest.raises(HearthError) as caught:
        KVCacheManager(CONFIG, CpuDevice()).capture(row, length)
    assert caught.value.code == "internal"
