import tracemalloc
from typing import Any

import msgspec
import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.page_loads import LoadCostModel
from hearth.runtime.kv_cache.page_pool import page_bytes, prefix_capacity, record_bytes
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    Match,
    Page,
    Place,
    Tier,
    TierCapacity,
    TokenIdentities,
    page_name,
    root_name,
    shared_tokens,
)
from hearth.runtime.options import RuntimeOptions

ROOT = root_name(b"engine", b"")
IMAGE = EmbeddedImage(Slot(0, 64, 1), 6, (ImageSpan(2, 6, 0, (1, 2, 3)),), b"a picture")


def shared(one: TokenIdentities, other: TokenIdentities) -> int:
    return shared_tokens(one.between(0, len(one)), other.between(0, len(other)))


def of(images: list[EmbeddedImage], ids: list[int] | None = None) -> TokenIdentities:
    return TokenIdentities(ROOT, ids or list(range(10)), images)


def test_tokens_are_the_same_by_their_ids() -> None:
    assert shared(of([]), of([])) == 10
    assert shared(of([]), of([], [0, 1, 2, 4, 4])) == 3
    assert shared(of([]), of([], [0, 1, 2])) == 3
    assert shared(of([]), of([], [1])) == 0


def test_an_images_tokens_are_known_by_the_image_whatever_their_ids() -> None:
    assert shared(of([IMAGE]), of([IMAGE], [0, 1, *[9] * 6, 8, 9])) == 10
    elsewhere = msgspec.structs.replace(IMAGE, slot=Slot(128, 64, 7))
    assert shared(of([IMAGE]), of([elsewhere])) == 10
    assert shared(of([IMAGE]), of([])) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"key": b"another picture"},
        {"spans": (ImageSpan(2, 6, 0, (1, 3, 2)),)},
        {"spans": (ImageSpan(2, 6, 6, (1, 2, 3)),)},
        {"spans": (ImageSpan(2, 6, 0, (1, 2, 3), 2.0),)},
    ],
)
def test_an_image_is_another_by_its_key_its_grid_and_what_of_it_is_shown(
    other: dict[str, object],
) -> None:
    assert shared(of([IMAGE]), of([msgspec.structs.replace(IMAGE, **other)])) == 2


def test_an_image_that_goes_on_longer_is_the_same_as_far_as_both_go() -> None:
    cut = TokenIdentities(ROOT, list(range(5)), [IMAGE])
    assert (len(cut), shared(of([IMAGE]), cut)) == (5, 5)


def test_what_is_behind_an_image_without_a_key_has_no_identity() -> None:
    unknown = msgspec.structs.replace(IMAGE, key=b"")
    assert len(of([unknown])) == 2
    assert len(of([IMAGE, msgspec.structs.replace(unknown, spans=(ImageSpan(9, 1),))])) == 9


def test_pages_are_named_by_their_tokens_and_all_before() -> None:
    ids = list(range(3 * PAGE_TOKENS))
    first, second, third = TokenIdentities(ROOT, ids).page_names(len(ids))
    tokens = TokenIdentities(ROOT, ids)
    assert second == page_name(first, tokens.between(PAGE_TOKENS, 2 * PAGE_TOKENS))
    assert tokens.page_names(len(ids) - 1) == [first, second]
    other = TokenIdentities(ROOT, [7, *ids[1:]]).page_names(len(ids))
    elsewhere = TokenIdentities(root_name(b"engine", b"adapter"), ids).page_names(len(ids))
    assert len({first, second, third, *other, *elsewhere}) == 9


def test_a_root_is_of_one_engine_one_adapter_and_one_salt() -> None:
    parts = [(b"ab", b""), (b"a", b"b"), (b"", b"ab")]
    assert len({root_name(*both, salt) for both in parts for salt in ("", "a", "b")}) == 9


def test_no_salt_makes_a_root_of_a_page_s_name() -> None:
    tokens = TokenIdentities(ROOT, [7] * PAGE_TOKENS)
    salt = tokens.between(0, PAGE_TOKENS).decode()
    engine_and_adapter = (b"engine", b"")
    root = root_name(*engine_and_adapter)
    assert root_name(*engine_and_adapter, salt) != page_name(root, salt.encode())


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


def match(device: int = 0, disk: int = 0, rest: int = 0) -> Match:
    """So many pages in device memory and on disk, and some tokens of one more there."""
    pages = [Page(b"", b"", None, Place("device", slot)) for slot in range(device)]
    pages += [Page(b"", b"", None, on_disk=True) for _ in range(disk + bool(rest))]
    return Match(tuple(pages), PAGE_TOKENS * (device + disk) + rest)


def load(cost_model: LoadCostModel, tier: Tier, tokens: int, seconds: float) -> None:
    """As often as it takes to be believed."""
    for _ in range(3):
        cost_model.record_loaded(tier, tokens, seconds)


def measured(device_s: float, disk_s: float) -> LoadCostModel:
    """A millisecond for each token that is computed, and so much for 100 that are loaded."""
    cost_model = LoadCostModel()
    cost_model.record_computed(500, 0.5)
    load(cost_model, "device", 100, device_s)
    load(cost_model, "disk", 100, disk_s)
    return cost_model


def test_what_was_never_measured_is_tried() -> None:
    cost_model = LoadCostModel()
    assert cost_model.tokens(match(2, 3)) == 160
    cost_model.record_computed(100, 0.1)
    assert cost_model.tokens(match(2, 3)) == 160
    for tokens in (64, 64, 0):
        cost_model.record_loaded("device", 64, 9.0)
        assert cost_model.tokens(match(2)) == tokens


def test_a_prefix_that_loads_faster_than_it_is_computed_is_loaded() -> None:
    assert measured(0.01, 0.09).tokens(match(4, 4, 5)) == 261


def test_what_would_take_longer_from_the_disk_is_computed() -> None:
    cost_model = measured(0.01, 0.2)
    assert cost_model.tokens(match(4, 4, 5)) == 128
    assert cost_model.tokens(match(0, 4)) == 0


def test_pages_that_cost_more_are_loaded_where_those_behind_them_make_up_for_it() -> None:
    cost_model = LoadCostModel()
    cost_model.record_computed(100, 0.1)
    load(cost_model, "device", 32, 0.1)
    load(cost_model, "disk", 1000, 0.001)
    load(cost_model, "disk", 1, 0.001)
    assert cost_model.tokens(match(1)) == 0
    assert cost_model.tokens(match(1, 8)) == 288


def test_few_tokens_take_as_long_as_the_shortest_load_at_least() -> None:
    cost_model = measured(0.01, 0.01)
    assert cost_model.tokens(match(0, 0, 9)) == 0
    assert cost_model.tokens(match(0, 0, 10)) == 10
    load(cost_model, "disk", 32, 0.004)
    assert cost_model.tokens(match(0, 0, 4)) == 4


def test_a_token_costs_what_it_does_in_the_widest_chunks() -> None:
    cost_model = measured(0.05, 0.05)
    assert cost_model.tokens(match(2)) == 64
    cost_model.record_computed(1000, 0.4)
    for _ in range(20):
        cost_model.record_computed(1, 0.2)
    assert cost_model.tokens(match(2)) == 0


def test_a_stall_counts_for_nothing() -> None:
    cost_model = measured(0.01, 0.01)
    for tokens in [64] * 7 + [0]:
        cost_model.record_loaded("device", 100, 5.0)
        assert cost_model.tokens(match(2)) == tokens


def test_what_is_refused_is_tried_now_and_then() -> None:
    cost_model = measured(0.5, 0.5)
    assert [cost_model.tokens(match(2)) for _ in range(32)].count(64) == 2
    load(cost_model, "device", 64, 0.001)
    assert cost_model.tokens(match(2)) == 64
