from typing import cast

import pytest
from msgspec import structs

from runtime.executor.kernels.attention import (
    SPAN,
    SPLIT,
    Attention,
    AttentionArguments,
    AttentionPlan,
    AttentionShape,
    plan_attention,
)
from runtime.executor.kernels.launch import GpuFacts, WantedKernels
from tests.runtime.engine_configs import small_config

SMALL = AttentionShape(128, 16, 8)
WIDE = AttentionShape(256, 4, 2)
MANY = AttentionShape(64, 20, 1)
BOARD, CARD = 16, 132
SIZES = [
    (batch, seq_len, slots)
    for batch in (1, 3, 8, 64)
    for seq_len in (1, 2, 8, 60, 128, 512)
    for slots in (512, 2048, 32768)
]


@pytest.mark.parametrize("multiprocessors", [BOARD, CARD])
@pytest.mark.parametrize("shape", [SMALL, WIDE, MANY])
def test_a_plan_has_place_for_all_that_its_blocks_leave(
    shape: AttentionShape, multiprocessors: int
) -> None:
    for batch, seq_len, slots in SIZES:
        plan = plan_attention(shape, multiprocessors, batch, seq_len, slots)
        splits = -(-slots // SPLIT)
        assert (plan.tiles - 1) * plan.rows < seq_len * shape.group <= plan.tiles * plan.rows
        assert (plan.fused > 0) == (seq_len * shape.group <= 16)
        assert not plan.fused or seq_len * shape.group <= 8 * plan.fused
        if plan.whole:
            assert (plan.parts, plan.units) == (1, 1)
            continue
        assert 1 <= plan.parts <= splits
        assert plan.units >= max(-(-splits // SPAN), plan.fine)


def attention(wanted: WantedKernels, head_dim: int = 128, *, own_tables: bool = False) -> Attention:
    config = structs.replace(
        small_config(),
        dtype="bfloat16",
        num_attention_heads=16,
        num_kv_heads=8,
        head_dim=head_dim,
        rotary_dim=head_dim,
        use_context_dependent_rope=own_tables,
    )
    facts = GpuFacts((9, 0), CARD, 232_448, 233_472)
    return Attention(wanted, facts, config, eps=0.5, qk_norm=False)


def test_one_token_a_row_is_one_launch() -> None:
    wanted = WantedKernels()
    made = attention(wanted, own_tables=True)
    made.use_scratch(1 << 20)
    made.use_tickets(1 << 10)
    (launch,) = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), 10, 11, 8, 1, 2048)
    assert launch.grid == (8, 8, 8)
    told = cast(AttentionArguments, launch.arguments)
    assert (told.qkv, told.keys, told.values, told.start, told.positions) == (1, 4, 5, 6, 7)
    assert (told.cos, told.sin, told.mask, told.out, told.tickets) == (8, 9, 10, 11, 1 << 10)
    assert (told.q_gain, told.k_gain) == (0, 0)
    assert told.table_rows == small_config().max_kv_cache_capacity
    end = told.sums + 8 * 8 * told.units * 2 * 8
    assert (told.partial, end) == (1 << 20, (1 << 20) + made.scratch_bytes(8, 1, 2048))
    assert made.ticket_bytes(8, 1, 2048) == 8 * 8 * 9 * 4
    (request, other) = wanted.requests
    assert {"-DFUSED=1", "-DTREE=0", "-DBFLOAT=1", "-DSHARE=4"} < set(request.options)
    assert other.options == request.options


@pytest.mark.parametrize("mask", [0, 1])
def test_several_tokens_a_row_are_rotated_first(mask: int) -> None:
    wanted = WantedKernels()
    made = attention(wanted)
    rotate, attend = made.launches(1, (2, 3), (4, 5), 6, 7, (8, 9), mask, 11, 2, 60, 2048)
    assert (rotate.name, rotate.grid) == ("rotate", (240, 1, 1))
    assert attend.grid[1:] == (8, 8)
    assert all(f"-DTREE={mask}" in one.options for one in wanted.requests)


def test_a_prompt_leaves_nothing_but_its_queries() -> None:
    made = attention(WantedKernels())
    assert made.plan(1, 512, 2048) == AttentionPlan(2, 32, whole=True)
    assert made.scratch_bytes(1, 512, 2048) == 512 * 16 * 128 * 2
    assert made.ticket_bytes(1, 512, 2048) == 0
