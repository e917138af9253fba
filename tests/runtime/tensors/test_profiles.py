import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.tensors.dims import PROFILE_CONTEXT, PROFILE_GENERATION, InferenceDims
from hearth.runtime.tensors.profiles import (
    build_profiles,
    captured_prompts,
    captured_widths,
    decode_batches,
    generation_profile,
    prefill_width,
    prefill_widths,
)

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
