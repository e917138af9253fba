"""Pages go to disk when the device has copied them, and nobody waits for that."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import FileRecord
from hearth.runtime.device.cpu.cpu_device import CpuDevice, HostSpan
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, DiskCache
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.kv_cache.page_loads import DiskTier, LoadCostModel, PageLoads
from hearth.runtime.kv_cache.page_pool import STAGED, PagePool
from hearth.runtime.kv_cache.pages import Match, Place, Save, TierCapacity, Write
from hearth.runtime.kv_cache.prefix_cache import engine_digest, is_exact
from tests.runtime.engine_configs import small_config
from tests.runtime.kv_cache.prompts import files, pages

CONFIG = structs.replace(small_config(), dialect="native", device="cpu")


@pytest.mark.parametrize(
    ("changed", "exact"),
    [
        ({}, True),
        ({"weight_quantization": "int4"}, True),
        ({"weight_quantization": "int4", "head_quantization": "int8"}, False),
        ({"weight_quantization": "int8"}, False),
        ({"dialect": "classic"}, False),
        ({"dtype": "float16"}, False),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "backend": "kernels", "dtype": "bfloat16"}, True),
    ],
)
def test_bits_are_the_same_where_that_was_measured(changed: dict[str, Any], exact: bool) -> None:  # noqa: FBT001 - of a table
    assert is_exact(structs.replace(CONFIG, **changed), ("avx512_vnni",)) == exact


def test_products_of_four_bits_are_exact_with_the_instructions_that_were_measured_alone() -> None:
    assert is_exact(CONFIG, ("avx2",))
    assert not is_exact(structs.replace(CONFIG, weight_quantization="int4"), ("avx2",))


def test_what_computes_other_numbers_has_another_digest() -> None:
    weights = {"model.onnx.data": FileRecord(1, "aa")}
    engines = [
        [CONFIG],
        [structs.replace(CONFIG, files=weights)],
        [structs.replace(CONFIG, files={"model.onnx.data": FileRecord(1, "bb")})],
        [structs.replace(CONFIG, dialect="classic")],
        [structs.replace(CONFIG, device="cuda")],
        [CONFIG, CONFIG],
    ]
    assert len({engine_digest(one) for one in engines}) == len(engines)
    # Limits are the caller's: what lies on disk serves with others too.
    fewer = structs.replace(CONFIG, max_supported_batch_size=1, max_kv_cache_capacity=8)
    assert engine_digest([fewer]) == engine_digest([CONFIG])


SPILLING = simulated_config(layers=2, max_batch=2)


class SlowSpan(HostSpan):
    """Ends when its device goes on."""

    def __init__(self, device: "SlowDevice") -> None:
        super().__init__()
        self._device = device

    def end(self) -> None:
        if self._device.busy:
            self._device.spans.append(self)
        else:
            super().end()


class SlowDevice(CpuDevice):
    """Copies at once, and says so once it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = True
        self.spans: list[SlowSpan] = []

    def span(self) -> HostSpan:
        return SlowSpan(self)

    def go_on(self) -> None:
        self.busy = False
        for span in self.spans:
            span.end()


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def caches(device: SlowDevice) -> HybridCacheManager:
    return HybridCacheManager(SPILLING, device)


@pytest.fixture
def pool(device: SlowDevice, caches: HybridCacheManager) -> PagePool:
    return PagePool(device, [caches], TierCapacity(12, 0, 20))


@pytest.fixture
def disk(pool: PagePool, tmp_path: Path) -> DiskTier:
    return open_disk(pool, tmp_path)


def open_disk(pool: PagePool, folder: Path) -> DiskTier:
    size = pool.page_bytes
    return DiskTier(pool, DiskCache(folder, b"engine", size, 20 * (size + HEAD_BYTES)))


def test_a_page_is_handed_over_when_its_copy_has_ended(
    device: SlowDevice, disk: DiskTier, tmp_path: Path
) -> None:
    (page,) = pages([1])
    page.on_disk = True
    disk.write(page, Place("device", 0))
    disk.poll()
    assert disk.read(page) is None
    device.go_on()
    assert disk.read(page) == bytes(disk._pool.page_bytes)
    disk.close([])
    assert [path.stem for path in files(tmp_path)] == [page.name.hex()]


@pytest.mark.parametrize("draft", [False, True])
def test_a_file_says_of_the_draft_what_was_there_when_it_was_copied(
    device: SlowDevice, disk: DiskTier, pool: PagePool, tmp_path: Path, *, draft: bool
) -> None:
    (page,) = pages([1], draft=draft)
    disk.write(page, Place("device", 0))
    page.draft = not draft
    device.go_on()
    disk.close([])
    (found,) = open_disk(pool, tmp_path).disk_cache.found()
    assert found.draft == draft


def test_a_page_that_is_erased_on_its_way_is_not_written(
    device: SlowDevice, disk: DiskTier, tmp_path: Path
) -> None:
    first, second = pages([1, 2])
    disk.write(first, Place("device", 0))
    disk.write(second, Place("device", 1))
    disk.erase(second.name)
    device.go_on()
    disk.close([])
    assert [path.stem for path in files(tmp_path)] == [first.name.hex()]


def test_what_finds_no_place_on_the_way_is_lost(
    device: SlowDevice, disk: DiskTier, tmp_path: Path
) -> None:
    many = pages(list(range(STAGED + 1)))
    for slot, page in enumerate(many):
        disk.write(page, Place("device", slot))
    assert disk.take_lost() == [many[-1]]
    assert disk.take_lost() == []
    device.go_on()
    disk.close([])
    assert len(files(tmp_path)) == STAGED


def test_at_the_end_all_that_is_asked_for_is_written(
    device: SlowDevice, disk: DiskTier, tmp_path: Path
) -> None:
    many = pages(list(range(STAGED + 2)))
    device.go_on()
    disk.close([Write(page, Place("device", slot)) for slot, page in enumerate(many)])
    assert len(files(tmp_path)) == STAGED + 2


def test_what_a_device_never_copies_holds_up_no_end(
    disk: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.runtime.kv_cache.page_loads._CLOSING_S", 0.05)
    many = pages(list(range(STAGED + 2)))
    disk.close([Write(page, Place("device", slot)) for slot, page in enumerate(many)])
    assert files(tmp_path) == []


def test_a_page_comes_back_from_the_disk_as_it_was_saved(
    device: SlowDevice, disk: DiskTier, pool: PagePool, caches: HybridCacheManager, tmp_path: Path
) -> None:
    device.go_on()
    caches.reset(2)
    kept = []
    for tensor in (*caches.kv.keys, *caches.kv.values):
        view = tensor.array.reshape(-1)
        view[:] = range(view.size)
        kept.append(tensor.array.copy())
    (page,) = pages([1])
    pool.save([Save(page, Place("device", 3), 0, base=True, draft=False)], 1)
    disk.write(page, Place("device", 3))
    disk.close([])
    for tensor in (*caches.kv.keys, *caches.kv.values):
        tensor.array[...] = 0
    page.on_disk = True
    loads = PageLoads(pool, open_disk(pool, tmp_path), LoadCostModel(), 8)
    match = loads.take(Match((page,), 32))
    assert match.tokens == 32
    loads.load(match, 1, 32, 0)
    loads.done()
    restored = caches.kv.capture(1, 32)
    for tensor, before in zip((*caches.kv.keys, *caches.kv.values), kept, strict=True):
        tensor.array[...] = before
    for one, other in zip(restored, caches.kv.capture(1, 32), strict=True):
        assert (one == other).all()


def test_no_more_is_read_at_a_time_than_may_be(
    device: SlowDevice, disk: DiskTier, pool: PagePool
) -> None:
    device.go_on()
    written = pages([1, 2, 3])
    for page in written:
        disk.write(page, Place("device", 0))
        page.on_disk = True
    loads = PageLoads(pool, disk, LoadCostModel(), 2)
    assert loads.take(Match(tuple(written), 96)).tokens == 64
    loads.done()
    assert loads.take(Match(tuple(written), 40)).tokens == 40
    disk.close([])


def test_what_a_file_gives_no_bytes_of_is_told_with_its_page(
    disk: DiskTier, pool: PagePool
) -> None:
    first, second = pages([1, 2])
    first.place, second.on_disk = Place("device", 0), True
    loads = PageLoads(pool, disk, LoadCostModel(), 8)
    assert loads.take(Match((first, second), 64)).pages == (first,)
    ((page, error),) = loads.take_damaged()
    assert (page, error.code) == (second, "spill_invalid")
    assert loads.take_damaged() == []


def test_loading_is_judged_by_what_it_took(
    device: SlowDevice, disk: DiskTier, pool: PagePool
) -> None:
    device.go_on()
    cost_model = LoadCostModel()
    loads = PageLoads(pool, disk, cost_model, 8)
    (page,) = pages([1])
    page.place = Place("device", 0)
    match = Match((page,), 32)
    loads.computed(10_000_000, 1e-9)
    for _ in range(3):
        assert loads.take(match) == match
        loads.load(match, 0, 32, 0)
    assert (loads.take(match).tokens, loads.skipped) == (0, 32)
