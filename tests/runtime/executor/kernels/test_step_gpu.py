"""Rotation, attention, adapters and pieces of drafts on a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.programs import Programs
from hearth.runtime.executor.kernels.adapters import Adapter
from hearth.runtime.executor.kernels.attention import AttentionShape
from hearth.runtime.executor.kernels.draft_step import PART, DraftPieces, parts_bytes
from hearth.runtime.executor.kernels.product_arguments import Form, Weight
from hearth.runtime.executor.kernels.products import Products
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
from tests.runtime.executor.kernels.lab import EPSILON as HALF_ULP
from tests.runtime.executor.kernels.lab import TYPES, Lab

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


EPS = 1e-6
MOST = 48
ROWS = (40, 24, 24)


class Layer:
    """A product of 80 tokens with an adapter, in each of its kinds."""

    def __init__(
        self, lab: Lab, kind: str, dtype: DType, inputs: int = 328, matrices: tuple[int, ...] = ()
    ) -> None:
        self.lab, self.kind, self.dtype = lab, kind, TYPES[dtype]
        self.rng = np.random.default_rng(5)
        self.inputs, self.most = inputs, MOST
        self.matrices = matrices or {"normed": ROWS, "residual": (72,), "gated": (72, 72)}[kind]
        width, all_rows = len(self.matrices) * self.most, sum(self.matrices)
        self.x = self._numbers((80, self.inputs), wide=kind != "residual")
        self.before = self._numbers((80, all_rows), wide=True)
        self.gain = lab.put(self._numbers((self.inputs,)))
        self.weights = [self._numbers((rows, self.inputs)) for rows in self.matrices]
        self.bias = self._numbers((self.matrices[0],))
        self.a = self._numbers((width, self.inputs))
        self.b = self._numbers((all_rows, self.most))
        self.on_gpu = [lab.put(one) for one in (self.a, self.b, *self.weights, self.bias)]

    def run(self, first: int, tokens: int, rank: int | None) -> NDArray[Any]:
        """The tokens from `first` on, with an adapter of this rank or without."""
        lab, products = self.lab, Products(self.lab.programs, self.lab.facts, self.dtype)
        x = lab.put(self.x[first : first + tokens])
        before = lab.put(self.before[first : first + tokens])
        products.use_scratch(lab.poison((tokens, self.inputs), self.dtype).address)
        a, b, *weights, bias = (one.address for one in self.on_gpu)
        form = Form("bfloat16" if self.dtype != np.float16 else "float16")
        given = [Weight(one, rows, form) for one, rows in zip(weights, self.matrices, strict=True)]
        shrunk = lab.poison((tokens, len(self.a)), np.float32).address
        width = len(self.a)
        products.use_mailbox(lab.poison((2, tokens, width), np.float32).address, tokens, width)
        adapter = None
        if rank is not None:
            told = lab.put(np.array([rank], np.int32)).address
            adapter = Adapter(a, b, told, shrunk, len(self.a), self.most)
        kept = sum(self.matrices) if self.kind == "normed" else self.matrices[0]
        out = lab.poison((tokens, kept), self.dtype if self.kind == "gated" else np.float32)
        shape = (self.inputs, tokens)
        gain = self.gain.address
        if self.kind == "normed":
            given[0] = given[0]._replace(bias=bias)
            lab.run(
                products.normed(x.address, gain, EPS, given, *shape, out.address, adapter=adapter)
            )
        elif self.kind == "gated":
            lab.run(
                products.gated(
                    x.address, gain, EPS, given[0], given[1], *shape, out.address, adapter=adapter
                )
            )
        else:
            out = before
            lab.run(products.residual(x.address, given[0], *shape, out.address, adapter=adapter))
        return lab.read(out).astype(np.float64)

    def wanted(self, rank: int) -> NDArray[Any]:
        x = self.x.astype(np.float64)
        if self.kind != "residual":
            x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
            x = (x * self.lab.read(self.gain).astype(np.float64)).astype(self.dtype)
        x = x.astype(np.float64)
        parts, first = [], 0
        for place, matrix in enumerate(self.weights):
            ranks = slice(place * self.most, place * self.most + rank)
            b = self.b[first : first + len(matrix), :rank].astype(np.float64)
            low = x @ self.a[ranks].astype(np.float64).T @ b.T
            parts.append(x @ matrix.astype(np.float64).T + low)
            first += len(matrix)
        if self.kind == "gated":
            return np.asarray(parts[0] / (1 + np.exp(-parts[0])) * parts[1])
        if self.kind == "normed":
            parts[0] += self.bias.astype(np.float64)
            return np.concatenate(parts, -1)
        return np.asarray(self.before + parts[0])

    def _numbers(self, shape: tuple[int, ...], *, wide: bool = False) -> NDArray[Any]:
        numbers = self.rng.standard_normal(shape) * 0.3
        return numbers.astype(np.float32 if wide else self.dtype)


SHAPES: list[tuple[str, int, tuple[int, ...], DType]] = [
    ("normed", 328, ROWS, "float16"),
    ("normed", 328, ROWS, "bfloat16"),
    ("normed", 3400, (48, 8, 8), "float16"),
    ("residual", 40, (72,), "bfloat16"),
    ("residual", 4552, (1080,), "float16"),
    ("gated", 328, (72, 72), "bfloat16"),
    ("gated", 264, (3208, 3208), "float16"),
]
"""Kinds of products, inputs and rows: of one block and of many, in one group and in several."""


@pytest.mark.parametrize(("kind", "inputs", "matrices", "dtype"), SHAPES)
def test_a_product_adds_what_its_adapter_says_for_any_number_of_tokens(
    lab: Lab, kind: str, inputs: int, matrices: tuple[int, ...], dtype: DType
) -> None:
    layer = Layer(lab, kind, dtype, inputs, matrices)
    assert np.array_equal(layer.run(0, 80, 0), layer.run(0, 80, None))
    assert np.array_equal(layer.run(4, 3, 0), layer.run(4, 3, None))
    for rank in (3, 16, 21, 48):
        found, wanted = layer.run(0, 80, rank), layer.wanted(rank)
        away = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert away < (2e-2 if dtype == "bfloat16" else 3e-3)
        for first, tokens in ((0, 1), (3, 1), (5, 8), (6, 3), (7, 9), (10, 33), (2, 64), (1, 70)):
            alone = layer.run(first, tokens, rank)
            assert np.array_equal(alone, found[first : first + tokens]), (rank, first, tokens)


HIDDEN = (8, 96, 1024, 2568)


def normed(x: NDArray[Any], gain: NDArray[Any]) -> NDArray[Any]:
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * gain.astype(float))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("given", [True, False])
def test_embeddings_and_hidden_states_are_normed_side_by_side(
    lab: Lab, hidden: int, dtype: DType, *, given: bool
) -> None:
    rng, kind = np.random.default_rng(hidden), TYPES[dtype]
    tokens = 13
    x = rng.standard_normal((tokens, hidden)).astype(np.float32) * 3
    own, embeds = (rng.standard_normal((tokens, hidden)).astype(kind) for _ in range(2))
    own[4:] = 0
    gains = [rng.uniform(0.5, 1.5, hidden).astype(kind) for _ in range(2)]
    on_gpu = [lab.put(one) for one in (x, own, embeds, *gains)]
    out = lab.poison((tokens, 2 * hidden), kind)
    at = [one.address for one in on_gpu]
    pieces = DraftPieces(lab.programs, dtype)
    gains_at = (at[3], at[4])
    lab.run(
        pieces.fuse(at[0], at[1], at[2], gains_at, EPS, out.address, hidden, tokens, given=given)
    )
    both = x * given + own.astype(np.float32)
    np.testing.assert_array_equal(lab.read(on_gpu[0]), both)
    wanted = np.concatenate([normed(embeds, gains[0]), normed(both, gains[1])], -1)
    found = lab.read(out)
    np.testing.assert_allclose(
        found.astype(np.float64), wanted, rtol=1.01 * HALF_ULP[dtype] + 1e-5, atol=1e-6
    )
    # A token alone is the same token.
    alone = lab.poison((1, 2 * hidden), kind)
    size = hidden * kind.itemsize
    behind = 7 * size
    own_x, rest = lab.put(x[7:8]).address, (at[1] + behind, at[2] + behind)
    lab.run(
        pieces.fuse(own_x, rest[0], rest[1], gains_at, EPS, alone.address, hidden, 1, given=given)
    )
    assert lab.read(alone).tobytes() == found[7:8].tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_selected_tokens_lie_one_behind_the_other(lab: Lab, dtype: DType) -> None:
    rng, kind = np.random.default_rng(0), TYPES[dtype]
    rows, seq_len, kept, hidden, queries = 3, 9, 4, 72, 160
    x = rng.standard_normal((rows, seq_len, hidden)).astype(np.float32)
    context = rng.standard_normal((rows, seq_len, queries)).astype(kind)
    last = np.array([[5, 6, 7, 8], [0, 2, 1, 3], [8, 8, 0, 4]])
    out = lab.poison((rows, kept, hidden), np.float32), lab.poison((rows, kept, queries), kind)
    places = lab.poison((rows, kept), np.int64)
    lab.run(
        DraftPieces(lab.programs, dtype).select(
            (lab.put(x).address, out[0].address, hidden),
            (lab.put(context).address, out[1].address, queries),
            lab.put(last).address,
            places.address,
            (rows, seq_len, kept),
        )
    )
    np.testing.assert_array_equal(lab.read(out[0]), np.take_along_axis(x, last[:, :, None], 1))
    np.testing.assert_array_equal(
        lab.read(out[1]), np.take_along_axis(context, last[:, :, None], 1)
    )
    assert not lab.read(places).any()


@pytest.mark.parametrize("vocabulary", [1, 96, 4095, PART, PART + 1, 32000, 151936])
@pytest.mark.parametrize("rows", [1, 3, 80])
def test_log_probabilities_are_those_of_numpy(lab: Lab, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32) * 8
    logits[0, : vocabulary // 2] = -np.inf
    logits[-1] += 300
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    wanted = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    on_gpu = lab.put(logits)
    parts = lab.poison((parts_bytes(rows, vocabulary) // 4,), np.float32)
    pieces = DraftPieces(lab.programs, "float16")
    lab.run(pieces.log_softmax(on_gpu.address, parts.address, rows, vocabulary))
    found = lab.read(on_gpu)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=6e-5)
    again = lab.put(logits[rows // 2 : rows // 2 + 1])
    lab.run(pieces.log_softmax(again.address, parts.address, 1, vocabulary))
    assert lab.read(again).tobytes() == found[rows // 2 : rows // 2 + 1].tobytes()
