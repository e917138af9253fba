import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.config import DRAFT_ARCHITECTURE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.tensors.profiles import (
    PROFILE_CONTEXT,
    PROFILE_GENERATION,
    InferenceDims,
    bucket_for,
    bucket_sizes,
    build_profiles,
    captured_prompts,
    captured_widths,
    decode_batches,
    generation_profile,
    prefill_width,
    prefill_widths,
    static_dims,
)
from tests.runtime.engine_configs import small_config


def _sizes(dims: InferenceDims) -> tuple[int, ...]:
    return tuple(dims)


def test_the_five_recipes() -> None:
    # batch, seq, kv, select, mask columns, start indices
    assert _sizes(InferenceDims.prefill(3, 40, 256)) == (3, 40, 256, 1, 40, 3)
    assert _sizes(InferenceDims.decode(3, 256)) == (3, 1, 256, 1, 1, 3)
    assert _sizes(InferenceDims.spec_verify(2, 60, 512)) == (2, 60, 512, 60, 60, 2)
    assert _sizes(InferenceDims.proposal(2, 33, 10, 512)) == (2, 33, 512, 10, 33, 2)
    assert _sizes(InferenceDims.accept(2, 7, 512)) == (2, 7, 512, 1, 7, 2)


def test_equal_steps_are_equal_keys() -> None:
    assert len({InferenceDims.decode(1, 256), InferenceDims.prefill(1, 1, 256)}) == 1


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [
        (100, (100,)),
        (256, (256,)),
        (257, (256, 257)),
        (384, (256, 384)),
        (600, (256, 384, 512, 600)),
        (2048, (256, 384, 512, 768, 1024, 2048)),
        (3000, (256, 384, 512, 768, 1024, 2048, 3000)),
    ],
)
def test_buckets_are_nearer_to_each_other_where_most_rows_end(
    capacity: int, sizes: tuple[int, ...]
) -> None:
    assert bucket_sizes(capacity) == sizes


def test_a_gpu_has_one_size() -> None:
    assert bucket_sizes(2048, "cuda") == (2048,)


@given(st.integers(1, 10_000), st.data())
def test_the_smallest_bucket_that_fits_is_taken(capacity: int, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, capacity))
    bucket = bucket_for(slots, bucket_sizes(capacity))
    assert slots <= bucket <= capacity
    assert not any(slots <= size < bucket for size in bucket_sizes(capacity))


def test_more_than_the_capacity_is_refused() -> None:
    with pytest.raises(HearthError) as caught:
        bucket_for(513, (256, 512))
    assert caught.value.code == "capacity_exceeded"


CONFIG = simulated_config(max_batch=4, capacity=1000, prefill_chunk=128)


def test_profiles_span_the_configured_steps() -> None:
    profiles = build_profiles(CONFIG)
    context, generation = profiles[PROFILE_CONTEXT], profiles[PROFILE_GENERATION]
    assert context.select("min") == InferenceDims.prefill(1, 1, 256)
    assert context.select("opt") == InferenceDims.prefill(4, 64, 1000)
    assert context.select("max") == InferenceDims.prefill(4, 128, 1000)
    assert generation.select("min") == InferenceDims.decode(1, 256)
    assert generation.select("max") == InferenceDims.decode(4, 1000)


def test_generation_spans_the_largest_trees() -> None:
    _, base = build_profiles(structs.replace(CONFIG, max_verify_tree_size=60))
    assert base.maximum == InferenceDims.spec_verify(4, 60, 1000)
    base.check(InferenceDims.decode(1, 256))
    # A chain of 12 slots is followed by 13 newest tokens.
    _, draft = build_profiles(structs.replace(CONFIG, max_draft_tree_size=12))
    draft.check(InferenceDims.accept(4, 13, 1000))
    with pytest.raises(HearthError, match="seq_len"):
        draft.check(InferenceDims.accept(4, 14, 1000))


def test_a_small_cache_bounds_the_chunk() -> None:
    context, _ = build_profiles(structs.replace(CONFIG, max_kv_cache_capacity=100))
    assert context.maximum == InferenceDims.prefill(4, 100, 100)
    assert context.minimum == InferenceDims.prefill(1, 1, 100)


@pytest.mark.parametrize(
    ("dims", "member"),
    [
        (InferenceDims.prefill(5, 1, 256), "batch"),
        (InferenceDims.prefill(1, 129, 256), "seq_len"),
        (InferenceDims.prefill(1, 1, 2000), "kv_len"),
        (InferenceDims.prefill(0, 1, 256), "batch"),
    ],
)
def test_a_step_outside_is_refused_by_member(dims: InferenceDims, member: str) -> None:
    context, _ = build_profiles(CONFIG)
    context.check(InferenceDims.prefill(4, 128, 1000))
    with pytest.raises(HearthError) as caught:
        context.check(dims)
    assert (caught.value.code, caught.value.field) == ("invalid_value", member)


def test_static_batches_have_a_profile_each() -> None:
    config = structs.replace(CONFIG, device="cuda", static_decode_batches=(1, 2, 4))
    context, *generation = build_profiles(config)
    assert context.minimum == InferenceDims.prefill(1, 1, 1000)
    assert [set(profile) for profile in generation] == [
        {InferenceDims.decode(rows, 1000)} for rows in (1, 2, 4)
    ]
    assert [generation_profile(config, rows) for rows in (1, 2, 4)] == [1, 2, 3]
    assert generation_profile(CONFIG, 3) == PROFILE_GENERATION


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_a_gpu_decodes_in_few_batch_sizes(limit: int, sizes: tuple[int, ...]) -> None:
    config = structs.replace(CONFIG, device="cuda", max_supported_batch_size=limit)
    assert decode_batches(config) == sizes
    assert decode_batches(structs.replace(config, static_decode_batches=(1, 8))) == (1, 8)
    assert decode_batches(structs.replace(config, device="cpu")) == tuple(range(1, limit + 1))


def test_prefill_steps_have_few_widths_on_a_gpu() -> None:
    config = structs.replace(CONFIG, device="cuda", prefill_chunk=200)
    assert prefill_widths(config) == (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 200)
    assert prefill_widths(structs.replace(config, max_kv_cache_capacity=20)) == (16, 20)
    assert prefill_widths(structs.replace(config, prefill_chunk=8)) == (8,)
    assert [prefill_width(config, tokens, 1000) for tokens in (1, 16, 17, 130, 193)] == [
        16,
        16,
        32,
        160,
        200,
    ]
    # Padding stays within a row; where it does not fit a step has the chunk's own width.
    assert (prefill_width(config, 17, 32), prefill_width(config, 17, 31)) == (32, 17)


def test_prefill_steps_have_any_width_on_a_cpu() -> None:
    assert prefill_widths(CONFIG) == ()
    assert prefill_width(CONFIG, 17, 1000) == 17


@pytest.mark.parametrize(
    ("longest", "widths"),
    [
        (256, (32, 64, 128, 256)),
        (512, (32, 64, 128, 256)),
        (200, (32, 64, 128, 200)),
        (64, (32, 64)),
        (20, (20,)),
    ],
)
def test_prefill_steps_of_few_widths_are_captured(longest: int, widths: tuple[int, ...]) -> None:
    config = structs.replace(CONFIG, device="cuda", backend="kernels", prefill_chunk=longest)
    assert captured_widths(config) == widths
    assert captured_prompts(config) == [(place, width) for place in range(4) for width in widths]
    graph = structs.replace(config, backend="onnxruntime")
    assert (captured_widths(graph), captured_prompts(graph)) == ((), [])


def test_captured_prefill_steps_are_bounded() -> None:
    config = structs.replace(CONFIG, backend="kernels", prefill_chunk=256)
    most = captured_prompts(structs.replace(config, max_supported_batch_size=64))
    assert len(most) == 32
    assert most[-1] == (7, 256)


def test_a_chunk_runs_in_a_captured_width_where_there_is_room() -> None:
    config = structs.replace(CONFIG, device="cuda", backend="kernels", prefill_chunk=512)
    widths = [prefill_width(config, tokens, 1000) for tokens in (1, 33, 129, 257, 300)]
    assert widths == [32, 64, 256, 320, 320]
    # Then in another that was run before, and last in its own.
    assert [prefill_width(config, 65, room) for room in (128, 127, 79)] == [128, 80, 65]


SIZES = (1, 2, 4)
PLAN = structs.replace(
    small_config(), backend="tensorrt", device="cuda", static_decode_batches=SIZES
)
BASE = structs.replace(
    PLAN,
    enable_eagle_spec_decode=True,
    eagle_layers=(0, 1, 2),
    output_hidden_dim=48,
    max_verify_tree_size=9,
)
DRAFT = structs.replace(
    PLAN,
    architecture=DRAFT_ARCHITECTURE,
    num_decoder_layers=1,
    base_hidden_dim=48,
    max_draft_tree_size=6,
    static_drafting=(2, 3),
)


def test_a_plain_engine_decodes() -> None:
    assert static_dims(PLAN) == tuple(InferenceDims.decode(size, 64) for size in SIZES)


@pytest.mark.parametrize("batch", SIZES)
def test_a_base_decodes_and_verifies(batch: int) -> None:
    profiles = build_profiles(BASE)
    assert len(profiles) == 7
    decode, verify = InferenceDims.decode(batch, 64), InferenceDims.spec_verify(batch, 9, 64)
    assert set(profiles[generation_profile(BASE, batch)]) == {decode}
    assert set(profiles[generation_profile(BASE, batch, second=True)]) == {verify}


@pytest.mark.parametrize("batch", SIZES)
def test_a_draft_proposes_and_takes_a_rounds_tokens(batch: int) -> None:
    profiles = build_profiles(DRAFT)
    assert len(profiles) == 7
    proposal, accept = InferenceDims.proposal(batch, 6, 2, 64), InferenceDims.accept(batch, 4, 64)
    assert set(profiles[generation_profile(DRAFT, batch)]) == {proposal}
    assert set(profiles[generation_profile(DRAFT, batch, second=True)]) == {accept}


def test_without_static_sizes_one_profile_serves_all() -> None:
    dynamic = structs.replace(DRAFT, static_decode_batches=(), static_drafting=())
    assert len(build_profiles(dynamic)) == 2
    assert generation_profile(dynamic, 2) == generation_profile(dynamic, 3, second=True) == 1
