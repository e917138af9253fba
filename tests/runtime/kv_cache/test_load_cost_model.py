from hearth.runtime.kv_cache.page_loads import LoadCostModel
from hearth.runtime.kv_cache.pages import PAGE_TOKENS, Match, Page, Place, Tier


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
