"""Rotation and attention on a GPU: against their forms, and bit by bit against themselves."""

from collections.abc import Iterator

import numpy as np
import pytest

from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.device.cuda.programs import Programs
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.kernels.attention import AttentionShape
from hearth.runtime.reference.token_trees import node_depths, pack_mask
from tests.runtime.executor.kernels.attention_steps import (
    Array,
    Bench,
    Model,
    Result,
    Step,
    empty_caches,
    formed,
    other_plans,
    random_tokens,
)

pytestmark = pytest.mark.gpu

ODD = [0, 1, 62, 63, 64, 65, 255, 256, 257, 511, 700]
"""Lengths of caches about where a split or a span ends."""
MODELS = [
    Model(),
    Model("bfloat16", query_heads=16, kv_heads=8, head_dim=128, rotary_dim=128),
    Model(query_heads=3, kv_heads=3, head_dim=16, rotary_dim=8, qk_norm=False),
    Model("bfloat16", query_heads=6, kv_heads=2, head_dim=80, rotary_dim=32),
    Model(query_heads=14, kv_heads=2, head_dim=64, rotary_dim=64, qk_norm=False),
    Model(query_heads=16, kv_heads=1, head_dim=48, rotary_dim=48),
    Model(query_heads=20, kv_heads=1, head_dim=128, rotary_dim=128),
    Model("bfloat16", query_heads=4, kv_heads=2, head_dim=256, rotary_dim=256),
    Model(query_heads=2, kv_heads=2, head_dim=176, rotary_dim=64),
]
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaDevice]:
    try:
        device = open_cuda_device()
    except HearthError as error:
        pytest.skip(f"no GPU: {error.message}")
    yield device
    device.close()


@pytest.fixture(scope="module")
def programs(gpu: CudaDevice) -> Iterator[Programs]:
    made = Programs(gpu.context, gpu.library.compiler)
    yield made
    made.close()


def prefilled(model: Model, starts: list[int], slots: int, seed: int = 1) -> tuple[Array, Array]:
    """Caches that are filled up to each row's start, and none behind it."""
    drawn = np.random.default_rng(seed)
    keys, values = empty_caches(model, len(starts), slots)
    for row, start in enumerate(starts):
        shape = (model.kv_heads, start, model.head_dim)
        keys[row, :, :start] = drawn.normal(size=shape)
        values[row, :, :start] = drawn.normal(size=shape)
    return keys, values


def step_behind(
    model: Model,
    starts: list[int],
    qkv: Array,
    slots: int,
    caches: tuple[Array, Array] | None = None,
) -> Step:
    """Tokens qkv [B, S, heads, D] in a causal step."""
    start = np.array(starts)
    positions = start[:, None] + np.arange(qkv.shape[1])
    return Step(qkv, *(caches or prefilled(model, starts, slots)), start, positions)


def rows_of_tokens(model: Model, batch: int, seq_len: int, seed: int = 0) -> Array:
    tokens = random_tokens(model, batch * seq_len, seed)
    return tokens.reshape(batch, seq_len, *tokens.shape[1:])


def check_close(model: Model, found: Result, wanted: Result, what: object) -> None:
    for name in Result._fields:
        a = getattr(found, name).astype(np.float64)
        b = getattr(wanted, name).astype(np.float64)
        assert np.array_equal(np.isnan(a), np.isnan(b)), (
            what,
            name,
            "NaN",
            where(np.isnan(a) != np.isnan(b)),
        )
        # A power's rounding counts once for each of the positions that share a sum.
        wrong = ~(np.abs(a - b) <= EPSILON[model.dtype] * (2 * np.abs(b) + 1)) & ~np.isnan(b)
        assert not wrong.any(), (what, name, where(wrong), a[wrong][:3], b[wrong][:3])


def where(wrong: Array) -> tuple[int, list[list[int]]]:
    return int(wrong.sum()), np.argwhere(wrong)[:4].tolist()


def same_bits(found: Array, wanted: Array, what: object) -> None:
    wrong = found.view(np.uint16) != wanted.view(np.uint16)
    assert not wrong.any(), (what, where(wrong), found[wrong][:3], wanted[wrong][:3])


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_one_token_a_row_is_as_its_form(gpu: CudaDevice, programs: Programs, model: Model) -> None:
    step = step_behind(model, ODD, rows_of_tokens(model, len(ODD), 1), 720)
    check_close(model, Bench(gpu, programs, model).run(step), formed(model, step), "decode")


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("seq_len", [5, 67])
def test_chunks_are_as_their_form(
    gpu: CudaDevice, programs: Programs, model: Model, seq_len: int
) -> None:
    starts = [0, 61, 200]
    step = step_behind(model, starts, rows_of_tokens(model, 3, seq_len), 300)
    check_close(model, Bench(gpu, programs, model).run(step), formed(model, step), seq_len)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_cut_of_a_step_changes_a_bit(gpu: CudaDevice, programs: Programs, model: Model) -> None:
    bench = Bench(gpu, programs, model)
    shape = AttentionShape(model.head_dim, model.query_heads, model.kv_heads)
    tokens, slots = rows_of_tokens(model, 1, 330), 384
    wanted = bench.run(step_behind(model, [0], tokens, slots))
    assert np.isfinite(wanted.out.astype(np.float32)).all()
    for start, seq_len in (
        (0, 330),
        (329, 1),
        (256, 1),
        (255, 1),
        (0, 1),
        (60, 9),
        (62, 4),
        (254, 5),
        (250, 70),
    ):
        caches = prefilled(model, [0], slots)
        for cache, whole in zip(caches, wanted[1:], strict=True):
            cache[:, :, :start] = whole[:, :, :start]
        part = slice(start, start + seq_len)
        step = step_behind(model, [start], tokens[:, part], slots, caches)
        plans = (None, *other_plans(shape, seq_len, slots))
        bench.prepare(plans, seq_len)
        for plan in plans:
            found = bench.run(step, plan)
            same_bits(found.out, wanted.out[:, part], (start, seq_len, plan))
            same_bits(found.keys[:, :, part], wanted.keys[:, :, part], (start, seq_len, plan))
            same_bits(found.values[:, :, part], wanted.values[:, :, part], (start, seq_len, plan))
            assert np.isnan(found.keys[:, :, start + seq_len :].astype(np.float32)).all()


@pytest.mark.parametrize("model", MODELS[:4], ids=str)
@pytest.mark.parametrize("seq_len", [1, 3, 40])
def test_no_other_row_and_no_padding_changes_a_bit(
    gpu: CudaDevice, programs: Programs, model: Model, seq_len: int
) -> None:
    bench, slots = Bench(gpu, programs, model), 1024
    starts = [0, 63, 1000 - seq_len, 64, 255, 300, 17, 512]
    tokens = rows_of_tokens(model, 8, seq_len)
    together = bench.run(step_behind(model, starts, tokens, slots))
    padded = np.concatenate([tokens, rows_of_tokens(model, 8, 24, 3)], axis=1)
    step = step_behind(model, starts, padded, slots)
    step.positions[:, seq_len:] = 0
    wide = bench.run(step)
    for row, start in enumerate(starts):
        keys, values = prefilled(model, starts, slots)
        caches = (keys[row : row + 1], values[row : row + 1])
        alone = bench.run(step_behind(model, [start], tokens[row : row + 1], slots, caches))
        same_bits(together.out[row], alone.out[0], (row, "batch"))
        same_bits(together.keys[row], alone.keys[0], (row, "batch"))
        same_bits(wide.out[row, :seq_len], alone.out[0], (row, "padding"))


def random_tree(nodes: int, seed: int) -> Array:
    """Parents [1, nodes] of a tree, which is deep if it is large; the last two are not there."""
    drawn, far = np.random.default_rng(seed), 12 if nodes < 200 else 3
    parents = [-1] + [int(drawn.integers(max(0, node - far), node)) for node in range(1, nodes)]
    parents[-2:] = [-2, -2]
    return np.array([parents], np.int32)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(
    ("start", "nodes"), [(0, 8), (50, 16), (61, 60), (250, 90), (300, 8), (30, 240)]
)
def test_a_node_of_a_tree_is_as_its_path_in_a_chain(
    gpu: CudaDevice, programs: Programs, model: Model, start: int, nodes: int
) -> None:
    bench, slots = Bench(gpu, programs, model), 448
    shape = AttentionShape(model.head_dim, model.query_heads, model.kv_heads)
    tokens = rows_of_tokens(model, 1, nodes)
    parents = random_tree(nodes, nodes)
    mask = pack_mask(parents)
    depths = node_depths(mask)
    step = step_behind(model, [start], tokens, slots)
    positions = np.where(depths < 0, 0, start + depths)
    step = step._replace(positions=positions, mask=mask)
    wanted = formed(model, step)
    plans = (None, *other_plans(shape, nodes, slots))
    bench.prepare(plans, nodes, tree=True)
    for found in (bench.run(step, plan) for plan in plans):
        check_close(model, found, wanted, "form")
    found = bench.run(step)
    for node in (0, 1, nodes // 2, nodes - 3):
        path = [node]
        while parents[0, path[0]] >= 0:
            path.insert(0, int(parents[0, path[0]]))
        chain = bench.run(step_behind(model, [start], tokens[:, path], slots))
        same_bits(found.out[0, node], chain.out[0, -1], (node, "chain"))
        last = len(path) - 1
        caches = prefilled(model, [start], slots)
        for cache, whole in zip(caches, chain[1:], strict=True):
            cache[:, :, : start + last] = whole[:, :, : start + last]
        alone = bench.run(step_behind(model, [start + last], tokens[:, [node]], slots, caches))
        same_bits(found.out[0, node], alone.out[0, 0], (node, "alone"))
    for plan in plans[1:]:
        same_bits(bench.run(step, plan).out, found.out, plan)


@pytest.mark.parametrize("model", MODELS[:3], ids=str)
def test_a_causal_mask_is_as_none(gpu: CudaDevice, programs: Programs, model: Model) -> None:
    bench, slots = Bench(gpu, programs, model), 320
    for start, seq_len in ((0, 150), (40, 30), (70, 1)):
        step = step_behind(model, [start], rows_of_tokens(model, 1, seq_len), slots)
        wanted = bench.run(step)
        mask = pack_mask(np.arange(-1, seq_len - 1, dtype=np.int32)[None])
        same_bits(bench.run(step._replace(mask=mask)).out, wanted.out, (start, seq_len))
