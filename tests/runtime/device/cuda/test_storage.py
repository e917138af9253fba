"""Storage on a GPU: rows, copies, and pages that go to disk and back into the slots of a row."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import RowMove
from hearth.runtime.device.cpu.ops import CpuCacheStorage
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.storage import CudaCacheStorage
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, DiskCache
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.kv_cache.page_loads import DiskTier, LoadCostModel, PageLoads
from hearth.runtime.kv_cache.page_pool import PagePool
from hearth.runtime.kv_cache.pages import Match, Place, Save, TierCapacity
from hearth.runtime.reference.ops import PageCopy
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.kv_cache.arranged_rows import House, live
from tests.runtime.kv_cache.prompts import files, pages

pytestmark = pytest.mark.gpu

LAYERS, HEADS, SLOTS = 3, 2, 19
BFLOAT = np.dtype(ml_dtypes.bfloat16)
# Types and widths: 16-byte units, 2-byte units, and sizes between.
SHAPES = [
    (np.dtype(np.float16), 128),
    (BFLOAT, 257),
    (np.dtype(np.float32), 1),
    (np.dtype(np.float16), 6),
    (np.dtype(np.float16), 4),
]


class Caches:
    """The same random caches on the host and on the device."""

    def __init__(self, gpu: CudaDevice, rows: int, dtype: np.dtype[Any], head_dim: int) -> None:
        self.gpu = gpu
        self.rng = np.random.default_rng(head_dim)
        self.shape = (rows, HEADS, SLOTS, head_dim)
        self.dtype = dtype
        arrays = [self.random(self.shape) for _ in range(2 * LAYERS)]
        self.host = [Tensor(f"cache {i}", array) for i, array in enumerate(arrays)]
        self.device = [gpu.constant(tensor.name, tensor.array) for tensor in self.host]
        self.cpu = CpuCacheStorage(self.host, HEADS, head_dim)
        self.cuda: CudaCacheStorage = gpu.cache_storage(self.device, HEADS, head_dim)

    def random(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def check(self) -> None:
        for got, wanted in zip(self.device, self.host, strict=True):
            assert self.gpu.read(got).tobytes() == wanted.array.tobytes(), wanted.name


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(1, 0), (5, 0), (5, 1)])
def test_new_rows_are_written_from_each_rows_start(
    gpu: CudaDevice, dtype: np.dtype[Any], head_dim: int, index: type, shape: tuple[int, int]
) -> None:
    steps, first = shape
    caches = Caches(gpu, 4, dtype, head_dim)
    start = Tensor("start", np.array([0, 14, 3, 0], index))
    start_gpu = gpu.constant("start", start.array)
    for _ in range(2):
        fresh = [Tensor("new", caches.random((3, HEADS, steps, head_dim))) for _ in caches.host]
        fresh_gpu = [gpu.constant("new", tensor.array) for tensor in fresh]
        caches.cpu.write(fresh, start, (3, steps, SLOTS), first)
        caches.cuda.write(fresh_gpu, start_gpu, (3, steps, SLOTS), first)
        caches.check()


def test_a_slot_outside_of_the_cache_is_not_written(gpu: CudaDevice) -> None:
    caches = Caches(gpu, 2, np.dtype(np.float16), 8)
    start = gpu.constant("start", np.array([SLOTS, SLOTS - 1]))
    fresh = [gpu.constant("new", caches.random((2, HEADS, 2, 8))) for _ in caches.host]
    caches.cuda.write(fresh, start, (2, 2, SLOTS))
    for host, new in zip(caches.host, fresh, strict=True):
        host.array[1, :, SLOTS - 1] = gpu.read(new)[1, :, 0]
    caches.check()


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    "kept",
    [[], [0], [8], [1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 7]],
)
def test_rows_move_down_over_all_buffers(
    gpu: CudaDevice, dtype: np.dtype[Any], head_dim: int, kept: list[int]
) -> None:
    caches = Caches(gpu, 9, dtype, head_dim)
    used = caches.rng.integers(0, SLOTS + 1, len(kept)).tolist()
    moves = [
        RowMove(source, target, length)
        for target, (source, length) in enumerate(zip(kept, used, strict=True))
    ]
    caches.cpu.move(moves, (SLOTS, SLOTS))
    caches.cuda.move(moves, (SLOTS, SLOTS))
    caches.check()


@pytest.mark.parametrize(
    "order",
    [
        [(3, 5), (0, 3)],
        [(8, 0), (7, 8), (6, 7), (5, 6), (4, 5), (3, 4), (2, 3), (1, 2)],
        [(7, 1), (0, 7), (5, 0), (8, 5), (2, 8)],
    ],
)
def test_rows_move_up_and_down_in_any_order_of_free_targets(
    gpu: CudaDevice, order: list[tuple[int, int]]
) -> None:
    caches = Caches(gpu, 9, np.dtype(np.float16), 8)
    used = caches.rng.integers(1, SLOTS + 1, len(order)).tolist()
    moves = [RowMove(*pair, length) for pair, length in zip(order, used, strict=True)]
    caches.cpu.move(moves, (SLOTS, SLOTS))
    caches.cuda.move(moves, (SLOTS, SLOTS))
    caches.check()


def test_more_moves_than_one_launch_takes(gpu: CudaDevice) -> None:
    caches = Caches(gpu, 150, np.dtype(np.float16), 8)
    moves = [RowMove(row + 1, row, SLOTS) for row in range(149)]
    caches.cpu.move(moves, (SLOTS, SLOTS))
    caches.cuda.move(moves, (SLOTS, SLOTS))
    caches.check()


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
def test_a_row_is_saved_zeroed_and_restored(
    gpu: CudaDevice, dtype: np.dtype[Any], head_dim: int
) -> None:
    caches = Caches(gpu, 3, dtype, head_dim)
    saved = caches.cuda.read_row(1, 11, SLOTS)
    for got, wanted in zip(saved, caches.cpu.read_row(1, 11, SLOTS), strict=True):
        assert got.tobytes() == wanted.tobytes()
    caches.cpu.zero(1, 0, SLOTS, SLOTS)
    caches.cuda.zero(1, 0, SLOTS, SLOTS)
    caches.check()
    caches.cpu.zero(2, 3, 11, SLOTS)
    caches.cuda.zero(2, 3, 11, SLOTS)
    caches.cuda.zero(2, 4, 4, SLOTS)
    caches.check()
    caches.cpu.write_row(2, saved, SLOTS)
    caches.cuda.write_row(2, saved, SLOTS)
    caches.check()


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
@pytest.mark.parametrize("pinned", [False, True])
def test_pages_hold_what_rows_held(
    gpu: CudaDevice, dtype: np.dtype[Any], head_dim: int, *, pinned: bool
) -> None:
    caches = Caches(gpu, 6, dtype, head_dim)
    shape = (90, 2 * LAYERS, HEADS, 8, head_dim)
    host = Tensor.zeros("pages", shape, dtype)
    pool = (gpu.host_zeros if pinned else gpu.zeros)("pages", shape, dtype)
    random = caches.rng.integers
    saves = [
        PageCopy(page, offset, int(random(6)), int(random(SLOTS - 7)), 8 - offset)
        for page, offset in enumerate(random(0, 9, 90).tolist())
    ]
    loads = [PageCopy(int(random(90)), 1, row, 9 * half, 7) for row in range(6) for half in (0, 1)]
    for storage, held in ((caches.cpu, host), (caches.cuda, pool)):
        storage.save(held, saves, SLOTS)
        storage.load(held, loads, SLOTS)
        storage.load(held, [], SLOTS)
    caches.check()
    gpu.stream.synchronize()
    kept = pool.array if pinned else gpu.read(pool)
    assert kept.tobytes() == host.array.tobytes()


def test_a_page_goes_from_device_memory_to_pinned_memory_and_back(gpu: CudaDevice) -> None:
    pages = np.arange(24, dtype=np.float32).reshape(2, 12)
    device, pinned = gpu.constant("pages", pages), gpu.host_zeros("pages", (12,), pages.dtype)
    gpu.transfer(device.part("page", 12, (12,)), pinned)
    gpu.transfer(pinned, device.part("page", 0, (12,)))
    assert gpu.read(device).tolist() == pages[[1, 1]].tolist()
    with pytest.raises(HearthError, match="is to be copied into"):
        gpu.transfer(device, pinned)


def random_paths(rng: np.random.Generator, rows: int, room: int) -> NDArray[np.int32]:
    """Ascending nodes from 0 on, of different lengths, -1 behind them."""
    nodes = np.full((rows, room), -1, np.int32)
    for row in nodes:
        length = int(rng.integers(1, room + 1))
        row[1:length] = np.sort(rng.permutation(np.arange(1, room))[: length - 1])
        row[0] = 0
    return nodes


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
def test_accepted_slots_move_together(gpu: CudaDevice, dtype: np.dtype[Any], head_dim: int) -> None:
    caches = Caches(gpu, 5, dtype, head_dim)
    for _ in range(5):
        nodes = random_paths(caches.rng, 4, 12)
        starts = caches.rng.integers(0, SLOTS - 11, 4).tolist()
        caches.cpu.commit_path(nodes, starts, SLOTS)
        caches.cuda.commit_path(nodes, starts, SLOTS)
        caches.check()


@pytest.mark.parametrize("path", [[[0, 1, 2]], [[0, -1, -1]], [[-1, -1, -1]], [[]]])
def test_a_path_that_lies_in_place_moves_nothing(gpu: CudaDevice, path: list[list[int]]) -> None:
    caches = Caches(gpu, 2, np.dtype(np.float16), 8)
    caches.cuda.commit_path(np.array(path, np.int32), [SLOTS - 3], SLOTS)
    caches.check()


@pytest.mark.parametrize("path", [[0, 2, 1], [0, 2, 2], [0, -1, 3], [0, 1, 9]])
def test_a_path_that_does_not_ascend_within_its_row_is_refused(
    gpu: CudaDevice, path: list[int]
) -> None:
    caches = Caches(gpu, 2, np.dtype(np.float16), 8)
    with pytest.raises(HearthError, match="do not ascend"):
        caches.cuda.commit_path(np.array([path], np.int32), [SLOTS - 9], SLOTS)
    caches.check()


def test_what_a_cache_cannot_do_is_refused(gpu: CudaDevice) -> None:
    caches = Caches(gpu, 2, np.dtype(np.float16), 8)
    start = gpu.constant("start", np.zeros(2, np.int64))
    with pytest.raises(HearthError, match="cannot change"):
        caches.cuda.move([], (SLOTS, SLOTS + 1))
    with pytest.raises(HearthError, match="exceed"):
        caches.cuda.zero(2, 0, SLOTS, SLOTS)
    with pytest.raises(HearthError, match="do not agree"):
        caches.cuda.write([], start, (1, 1, SLOTS))
    with pytest.raises(HearthError, match="does not fit"):
        caches.cuda.write_row(0, [np.zeros((HEADS, 1, 8))] * 6, SLOTS)
    caches.check()


CONFIG = structs.replace(
    simulated_config(layers=3, max_batch=6, capacity=64),
    device="cuda",
    dtype="float16",
    kv_cache_dtype="float16",
    num_kv_heads=2,
    head_dim=8,
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_rows_hold_what_they_held_wherever_they_are_placed(
    gpu: CudaDevice, data: st.DataObject
) -> None:
    live(House(CONFIG, gpu, gpu.read), data, 40)


SPILLING = structs.replace(
    simulated_config(layers=3, max_batch=2, capacity=256),
    device="cuda",
    dtype="float16",
    kv_cache_dtype="float16",
    num_kv_heads=2,
    head_dim=16,
)
TOKENS = 96
WORTH_TRIALS = 4


def test_pages_go_to_disk_behind_the_stream_and_come_back(gpu: CudaDevice, tmp_path: Path) -> None:
    caches = HybridCacheManager(SPILLING, gpu)
    caches.reset(2)
    numbers = np.random.default_rng(0)
    kept = [
        numbers.standard_normal(part.shape).astype(part.dtype) for part in caches.kv.capture(0, 96)
    ]
    caches.kv.restore(1, kept)
    pool = PagePool(gpu, [caches], TierCapacity(4, 0, 20))
    disk_cache = DiskCache(
        tmp_path, b"engine", pool.page_bytes, 20 * (HEAD_BYTES + pool.page_bytes)
    )
    disk = DiskTier(pool, disk_cache)
    saved = pages([1, 2, 3])
    places = [Place("device", slot) for slot in (3, 0, 2)]
    saves = [
        Save(page, place, 32 * number, base=True, draft=False)
        for number, (page, place) in enumerate(zip(saved, places, strict=True))
    ]
    pool.save(saves, 1)
    for page, place in zip(saved, places, strict=True):
        disk.write(page, place)
        page.on_disk = True
    disk.close([])
    assert len(files(tmp_path)) == 3
    disk_cache = DiskCache(
        tmp_path, b"engine", pool.page_bytes, 20 * (HEAD_BYTES + pool.page_bytes)
    )
    loads = PageLoads(pool, DiskTier(pool, disk_cache), LoadCostModel(), 8)
    for _ in range(WORTH_TRIALS):
        caches.kv.zero(0, 0, TOKENS)
        match = loads.take(Match(tuple(saved), TOKENS))
        assert match.tokens == TOKENS
        loads.load(match, 0, TOKENS, 0)
        loads.done()
        for one, other in zip(caches.kv.capture(0, TOKENS), kept, strict=True):
            assert np.array_equal(one, other)
    loads.computed(1 << 20, 1e-9)
    assert loads.take(Match(tuple(saved), TOKENS)).tokens == 0


def test_a_buffer_is_written_copied_and_cleared_in_the_streams_order(gpu: CudaDevice) -> None:
    size = (3 << 20) + 5
    array = np.random.default_rng(0).integers(0, 255, size).astype(np.uint8)
    source, target = (gpu.zeros(name, (size,), array.dtype) for name in ("source", "target"))
    gpu.put(source, array)
    gpu.copy(target, source)
    gpu.put(source, array[::-1])
    assert np.array_equal(gpu.read(target), array)
    gpu.copy(target, source)
    assert np.array_equal(gpu.read(target), array[::-1])
    gpu.copy(target, None)
    assert not gpu.read(target).any()
