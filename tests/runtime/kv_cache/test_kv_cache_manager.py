from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.config import LLMEngineRunnerConfig, RopeConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import CpuImageOps
from hearth.runtime.device.device import RotaryTables
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.image_processing.positions import RowPositions, row_positions
from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager, KVCacheManager, RotaryRows
from hearth.runtime.request import RowRequest
from tests.runtime.arrangements import keep, new_row
from tests.runtime.engine_configs import small_config
from tests.runtime.kv_cache.arranged_rows import House, cache_view, live

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


HYBRID = simulated_config(layers=2, max_batch=4, capacity=1024)


def _started(lengths: list[int]) -> HybridCacheManager:
    caches = HybridCacheManager(HYBRID, CpuDevice())
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
    caches = HybridCacheManager(structs.replace(HYBRID, dialect="classic"), CpuDevice())
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
        HybridCacheManager(HYBRID, CpuDevice()).reset(batch)


def test_layers_are_found_by_their_absolute_number() -> None:
    caches = HybridCacheManager(HYBRID, CpuDevice())
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


SLOTS, PAIRS = 64, 4


class Counting(CpuImageOps):
    """Notes whose tables are filled."""

    def __init__(self) -> None:
        self.filled: list[int] = []

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        self.filled.append(row)
        super().fill_rotary(tables, row, positions)


def config(**changes: Any) -> LLMEngineRunnerConfig:
    rope = RopeConfig(type="mrope", mrope_section=(2, 1, 1))
    return structs.replace(
        small_config(), rope_config=rope, use_context_dependent_rope=True, **changes
    )


def rotary_rows() -> tuple[RotaryRows, Counting]:
    """Tables whose numbers are positions, and what fills them."""
    device, ops = CpuDevice(), Counting()
    device.image_ops = ops
    table = np.arange(SLOTS, dtype=np.float32)[:, None] + np.zeros(PAIRS, np.float32)
    return RotaryRows(config(), {"cos": table, "sin": -table}, device), ops


def seeing(start: int, grid: tuple[int, int, int]) -> RowRequest:
    count = int(np.prod(grid))
    image = EmbeddedImage(Slot(0, 0, start), count, (ImageSpan(start, count, 0, grid),))
    ids = [1] * (start + count + 2)
    return RowRequest(token_ids=ids, prompt_length=len(ids), images=[image])


def check(rows: RotaryRows, place: int, request: RowRequest | None) -> None:
    """The tables of a place are those of a row with such images, or of text."""
    cos, sin = (table.array[place] for table in rows.tensors)
    expected = np.tile(np.arange(SLOTS, dtype=np.float32)[:, None], (1, PAIRS))
    if request is not None:
        spans = [span for image in request.images for span in image.spans]
        prompt, delta = row_positions(request.prompt_length, spans)
        expected += delta
        expected[: prompt.shape[1]] = prompt[[0, 0, 1, 2]].T
    np.testing.assert_array_equal(cos, expected)
    np.testing.assert_array_equal(sin, -expected)


def test_tables_go_with_their_rows() -> None:
    rows, _ = rotary_rows()
    first, second, text = seeing(2, (1, 2, 3)), seeing(4, (1, 5, 2)), RowRequest(
        token_ids=[1], prompt_length=1
    )  # fmt: skip
    rows.reorder(BatchReorder.fresh([first, text, second]))
    for place, request in enumerate((first, None, second)):
        check(rows, place, request)
    check(rows, 3, None)
    rows.reorder(BatchReorder(2, moves=[RowMove(2, 0, 9)]))
    check(rows, 0, second)
    check(rows, 1, None)
    rows.reorder(
        BatchReorder(3, moves=[RowMove(0, 2, 9), RowMove(1, 0, 1)], assignments=[new_row(1, first)])
    )
    for place, request in enumerate((None, first, second)):
        check(rows, place, request)
    rows.reset(3)
    for place in range(3):
        check(rows, place, None)


def test_a_restored_prefix_stands_where_it_stood() -> None:
    rows, _ = rotary_rows()
    caches = HybridCacheManager(config(), CpuDevice())
    caches.rotary = rows
    picture = seeing(2, (1, 2, 3))
    rows.reorder(BatchReorder.fresh([picture]))
    caches.reset(1)
    length = picture.prompt_length + 1
    caches.commit([length])
    whole, image, before = (caches.capture(0, one) for one in (length, 8, 2))
    caches.reset(3)
    rows.reset(3)
    caches.restore(0, before)
    caches.restore(1, image)
    caches.restore(2, whole)
    assert caches.row_lengths == [2, 8, length]
    check(rows, 0, None)
    # What follows a picture stands behind it, be it prompt or reply.
    for place in (1, 2):
        check(rows, place, picture)


def test_rows_of_text_cost_nothing() -> None:
    rows, ops = rotary_rows()
    assert ops.filled == [0, 1, 2, 3]
    text = RowRequest(token_ids=[1, 2], prompt_length=2)
    rows.reorder(BatchReorder.fresh([text] * 4))
    rows.reorder(BatchReorder(2, moves=[RowMove(3, 0, 2)]))
    rows.reorder(BatchReorder(3, assignments=[new_row(2, seeing(1, (1, 1, 2)))]))
    rows.reorder(BatchReorder(3))
    assert ops.filled == [0, 1, 2, 3, 2]


def test_angles_that_begin_at_odd_addresses_are_refused_on_a_gpu() -> None:
    device = CpuDevice()
    table = np.zeros((60, PAIRS), np.float32)
    tables = {"cos": table, "sin": table}
    with pytest.raises(HearthError, match="multiple of 16") as caught:
        RotaryRows(config(device="cuda", max_kv_cache_capacity=60), tables, device)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "capacity")


ARRANGED = structs.replace(simulated_config(layers=2, max_batch=4, capacity=700), num_kv_heads=2)


@given(st.data())
def test_rows_hold_what_they_held_wherever_they_are_placed(data: st.DataObject) -> None:
    live(House(ARRANGED, CpuDevice(), lambda tensor: tensor.array), data, 400)
