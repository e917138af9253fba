"""Pages go from a GPU's memory to disk, and back into the slots of a row."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, DiskCache
from hearth.runtime.kv_cache.disk_tier import DiskTier
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.kv_cache.page_loads import LoadCostModel, PageLoads
from hearth.runtime.kv_cache.page_pool import PagePool
from hearth.runtime.kv_cache.pages import Match, Place, Save, TierCapacity
from tests.runtime.kv_cache.spills import files, pages

pytestmark = pytest.mark.gpu
CONFIG = structs.replace(
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
    caches = HybridCacheManager(CONFIG, gpu)
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
