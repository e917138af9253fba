from typing import cast

import pytest
from msgspec import structs

from hearth.runtime.config import Quantization
from hearth.runtime.device.cuda.compiler import config_fields
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.programs import WantedKernels
from hearth.runtime.executor.kernels.attention import (
    SPAN,
    SPLIT,
    Attention,
    AttentionArguments,
    AttentionPlan,
    AttentionShape,
    plan_attention,
    plan_nodes,
)
from tests.runtime.engine_configs import small_config

SMALL = AttentionShape(128, 16, 8)
WIDE = AttentionShape(256, 4, 2)
MANY = AttentionShape(64, 20, 1)
BOARD, CARD = 16, 132
QUANTIZATIONS: dict[Quantization, int] = {"none": 1, "int8": 0, "int4": 0}
SIZES = [
    (batch, seq_len, slots)
    for batch in (1, 3, 8, 64)
    for seq_len in (1, 2, 8, 60, 128, 512)
    for slots in (256, 512, 2048, 32768)
]


@pytest.mark.parametrize("multiprocessors", [BOARD, CARD])
@pytest.mark.parametrize("shape", [SMALL, WIDE, MANY])
def test_a_plan_has_place_for_all_that_its_blocks_leave(
    shape: AttentionShape, multiprocessors: int
) -> None:
    for batch, seq_len, slots in SIZES:
        plan = plan_attention(shape, multiprocessors, batch, seq_len, slots)
        assert (plan.tiles - 1) * plan.rows < seq_len * shape.group <= plan.tiles * plan.rows
        even = 8 % shape.group == 0
        assert plan.fused == (seq_len <= 16 and seq_len * shape.group <= (32 if even else 16))
        tokens = plan.tokens(shape.group)
        assert tokens * shape.group >= min(plan.rows, seq_len * shape.group)
        if plan.whole:
            assert (plan.parts, plan.units) == (1, 1)
            continue
        assert 1 <= plan.parts <= plan.units + tokens
        for start in range(0, slots - seq_len + 1, 61):
            for first in {start, start + seq_len}:  # as a tree, and as a chain
                units = most_units(plan.fine, first // SPLIT, -(-(start + seq_len) // SPLIT))
                assert units <= plan.units, (batch, seq_len, slots, start)


def most_units(fine: int, apart: int, splits: int) -> int:
    """Units of a tile of which the splits from `apart` on are those of single tokens."""
    return splits if splits <= fine else splits - min(apart, splits) // SPAN * (SPAN - 1)


def attention(
    wanted: WantedKernels,
    head_dim: int = 128,
    *,
    own_tables: bool = False,
    weights: Quantization = "none",
    cluster: int = 8,
) -> Attention:
    config = structs.replace(
        small_config(),
        dtype="bfloat16",
        weight_quantization=weights,
        num_attention_heads=16,
        num_kv_heads=8,
        head_dim=head_dim,
        rotary_dim=head_dim,
        use_context_dependent_rope=own_tables,
    )
    facts = GpuFacts((9, 0), CARD, 232_448, 233_472, cluster)
    return Attention(wanted, facts, config, eps=0.5, qk_norm=False)


def test_one_token_a_row_is_one_launch() -> None:
    wanted = WantedKernels()
    made = attention(wanted, own_tables=True)
    made.use_scratch(1 << 20)
    made.use_tickets(1 << 10)
    (launch,) = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 10, 11, 8, 1, 2048)
    assert launch.grid == (4, 8, 8)
    told = cast(AttentionArguments, launch.arguments)
    assert (told.qkv, told.keys, told.values, told.start, told.positions) == (1, 4, 5, 6, 7)
    assert (told.cos, told.sin, told.mask, told.out, told.tickets) == (8, 9, 10, 11, 1 << 10)
    assert (told.q_gain, told.k_gain) == (0, 0)
    assert told.table_rows == small_config().max_kv_cache_capacity
    end = told.sums + 8 * 8 * told.units * 2 * 8
    assert (told.partial, end) == (1 << 20, (1 << 20) + made.scratch_bytes(8, 1, 2048))
    assert made.ticket_bytes(8, 1, 2048) == 8 * 8 * 4 * 4
    (request, other) = wanted.requests
    found = config_fields(request.config).items()
    assert {"fused": True, "tree": False, "bfloat": True, "share": 4}.items() < found
    assert other.config == request.config


@pytest.mark.parametrize("slots", [64, 320, 2048])
def test_blocks_of_one_token_are_whole_clusters(slots: int) -> None:
    made = attention(WantedKernels())
    (launch,) = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 0, 11, 1, 1, slots)
    assert launch.grid == (SPAN, 8, -(-slots // (SPLIT * SPAN)))


def test_blocks_are_no_clusters_where_the_gpu_has_no_room_for_them() -> None:
    for cluster, clusters in ((8, 1), (4, 1), (2, 0), (1, 0)):
        wanted = WantedKernels()
        made = attention(wanted, cluster=cluster)
        made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 0, 11, 1, 1, 2048)
        assert {config_fields(one.config)["clustered"] for one in wanted.requests} == {clusters}


@pytest.mark.parametrize(("seq_len", "slots", "turns"), [(2, 256, 1), (8, 256, 1), (8, 2048, 2)])
def test_each_of_few_tokens_has_clusters_of_its_own(seq_len: int, slots: int, turns: int) -> None:
    made = attention(WantedKernels())
    (launch,) = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 10, 11, 1, seq_len, slots)
    assert launch.grid == (SPAN, 8, seq_len * turns)
    assert made.plan(1, seq_len, slots).lone
    assert not made.plan(8, 16, slots).lone  # there are blocks enough


def test_the_next_weights_are_asked_for_early_where_they_have_16_bits() -> None:
    for weights, early in QUANTIZATIONS.items():
        wanted = WantedKernels()
        made = attention(wanted, weights=weights)
        made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 0, 11, 1, 1, 2048)
        assert {config_fields(one.config)["early"] for one in wanted.requests} == {early}


@pytest.mark.parametrize("mask", [0, 1])
def test_several_tokens_a_row_are_rotated_first(mask: int) -> None:
    wanted = WantedKernels()
    made = attention(wanted)
    rotate, attend = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), mask, 11, 2, 60, 8192)
    assert (rotate.name, rotate.grid) == ("rotate", (240, 1, 1))
    assert attend.grid[1:] == (8, 16)
    assert {config_fields(one.config)["tree"] for one in wanted.requests} == {mask}


def test_nodes_have_blocks_of_eight_and_others_for_whole_spans() -> None:
    wanted = WantedKernels()
    made = attention(wanted)
    made.use_scratch(1 << 20)
    rotate, attend = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 10, 11, 1, 60, 2048)
    assert (rotate.name, rotate.grid) == ("rotate", (120, 1, 1))
    assert (attend.grid, attend.block) == ((8, 8, 8), 256)
    request = next(one for one in wanted.requests if one.file == "attention/nodes")
    assert request.shared_bytes == attend.shared_bytes
    assert config_fields(request.config)["shared_bytes"] == attend.shared_bytes
    (before,) = (one for one in wanted.requests if one.name == "rotate")
    assert config_fields(before.config)["for_nodes"]
    told = cast(AttentionArguments, attend.arguments)
    assert told.units == 8 + 2  # whole spans, and what may be two more behind them
    assert made.scratch_bytes(1, 60, 2048) == 60 * 16 * 128 * 2 + 64 * 10 * 16 * (128 * 4 + 8)
    assert made.ticket_bytes(1, 60, 2048) >= 64 * 4


def test_nodes_have_blocks_of_their_own_only_where_these_are_shorter() -> None:
    room = 232_448
    by_nodes = plan_nodes(SMALL, 60, 512)
    assert by_nodes is not None
    found = plan_attention(SMALL, CARD, 1, 60, 512, shared_per_block=room)
    assert found == by_nodes._replace(parts=1 + 2)
    for shape, count, batch, seq_len, slots, shared in (
        (SMALL, CARD, 1, 60, 8192, room),  # long caches are shared out over more blocks
        (SMALL, CARD, 8, 60, 512, room),  # of many rows there are blocks enough
        (SMALL, BOARD, 1, 60, 512, room),
        (SMALL, CARD, 1, 60, 512, 101_376),  # there is no room
        (SMALL, CARD, 1, 16, 512, room),
        (SMALL, CARD, 1, 65, 512, room),
        (WIDE, CARD, 1, 60, 512, room),
        (MANY, CARD, 1, 60, 512, room),
    ):
        plan = plan_attention(shape, count, batch, seq_len, slots, shared_per_block=shared)
        assert not plan.nodes


def test_a_prompt_leaves_nothing_but_its_queries() -> None:
    made = attention(WantedKernels())
    assert made.plan(1, 512, 2048) == AttentionPlan(2, 32, whole=True)
    assert made.scratch_bytes(1, 512, 2048) == 512 * 16 * 128 * 2
    assert made.ticket_bytes(1, 512, 2048) == 0
