import tracemalloc
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.page_pool import page_bytes, prefix_capacity, record_bytes
from hearth.runtime.kv_cache.pages import TierCapacity, TokenIdentities
from hearth.runtime.options import RuntimeOptions

BASE = simulated_config(layers=3)
DRAFT = structs.replace(BASE, num_attention_layers=1)
PAGE = 3 * 2 * 32 * BASE.num_kv_heads * BASE.head_dim * 4


def test_a_page_holds_its_tokens_in_all_layers_of_base_and_draft() -> None:
    assert page_bytes(BASE, None) == PAGE
    assert page_bytes(BASE, DRAFT) == PAGE // 3 * 4


def test_a_room_is_as_many_pages_as_fit() -> None:
    assert prefix_capacity(BASE, None, RuntimeOptions()) == TierCapacity(0, 0, 0)
    options = RuntimeOptions(
        prefix_cache_bytes=5 * PAGE - 1,
        prefix_host_bytes=2 * PAGE,
        prefix_disk_bytes=PAGE + HEAD_BYTES,
        prefix_folder="pages",
    )
    gpu = structs.replace(BASE, device="cuda")
    assert prefix_capacity(gpu, None, options) == TierCapacity(4, 2, 1)


def test_what_is_known_of_a_page_is_counted_and_is_no_less_than_it_takes() -> None:
    tracemalloc.start()
    try:
        index, before = PageIndex(TierCapacity(4096)), tracemalloc.get_traced_memory()[0]
        for row in range(1024):
            ids = [row * 128 + place for place in range(128)]
            index.insert(TokenIdentities(b"root", ids), 128)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(index) == 4096
    assert taken < record_bytes(TierCapacity(4096)) < 2 * taken
    assert record_bytes(TierCapacity(0, 3, 5)) == 0


@pytest.mark.parametrize(
    ("asked", "code", "field"),
    [
        ({"prefix_cache_bytes": -1}, "invalid_value", "prefix_cache_bytes"),
        ({"prefix_cache_bytes": PAGE - 1}, "invalid_value", "prefix_cache_bytes"),
        ({"prefix_host_bytes": PAGE}, "unsupported_option", "prefix_host_bytes"),
        ({"prefix_disk_bytes": 2 * PAGE}, "unsupported_option", "prefix_disk_bytes"),
        (
            {"prefix_cache_bytes": PAGE, "prefix_host_bytes": PAGE},
            "unsupported_option",
            "prefix_host_bytes",
        ),
        (
            {"prefix_cache_bytes": PAGE, "prefix_disk_bytes": 2 * PAGE},
            "invalid_value",
            "prefix_folder",
        ),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(
    asked: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(HearthError) as caught:
        prefix_capacity(BASE, None, RuntimeOptions(**asked))
    assert (caught.value.code, caught.value.field) == (code, field)
