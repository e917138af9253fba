"""Sums of products on a GPU, over groups and over quantised weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch
from hearth.runtime.executor.kernels import product_tiles
from hearth.runtime.executor.kernels.product_arguments import Form, Weight
from hearth.runtime.executor.kernels.product_tiles import SHAPES, GroupTiles
from hearth.runtime.executor.kernels.products import Products
from hearth.runtime.export.weights import MIDDLE, Kind, Quantised, pack, widen
from tests.runtime.executor.kernels import product_reference as gemm
from tests.runtime.executor.kernels.lab import TYPES, Lab
from tests.runtime.executor.kernels.model_shapes import GPUS

pytestmark = pytest.mark.gpu

Array = NDArray[Any]
EPS = 1e-6
FLOAT = Form("float16")
SIZES = [(8, (8,)), (72, (24, 8)), (200, (40, 16, 8)), (896, (136, 64, 64)), (2568, (264,))]
"""Inputs and rows of matrices one below the other."""
TOKENS = (1, 2, 8, 9, 16, 31, 64, 65, 130)


class Case:
    """One product on the GPU and what it has to be compared with."""

    def __init__(self, lab: Lab, dtype: DType, inputs: int, rows: Sequence[int]) -> None:
        random = np.random.default_rng(inputs)
        self.lab, self.inputs, self.rows, self.dtype = lab, inputs, sum(rows), TYPES[dtype]
        self.products = Products(lab.programs, lab.facts, self.dtype)
        parts = [random.standard_normal((count, inputs)) * inputs**-0.5 for count in rows]
        self.parts = [part.astype(self.dtype) for part in parts]
        self.bias = [random.standard_normal(count).astype(self.dtype) for count in rows]
        self.gain = random.uniform(0.5, 2, inputs).astype(self.dtype)
        self.x = random.standard_normal((max(TOKENS), inputs)).astype(np.float32)
        self.scratch = lab.poison((max(TOKENS), inputs), self.dtype)
        self.products.use_scratch(self.scratch.address)
        self.held = [lab.put(one) for one in (*self.parts, *self.bias, self.gain)]

    @property
    def weights(self) -> list[Weight]:
        count = len(self.parts)
        return [
            Weight(self.held[i].address, len(part), FLOAT, bias=self.held[count + i].address)
            for i, part in enumerate(self.parts)
        ]

    @property
    def gain_address(self) -> int:
        return self.held[-1].address

    def normed(self, x: Array) -> Array:
        """The kernels' norm and product of rows x."""
        given = self.lab.put(x)
        out = self.lab.poison((len(x), self.rows), np.float32)
        self.run(
            self.products.normed(
                given.address,
                self.gain_address,
                EPS,
                self.weights,
                self.inputs,
                len(x),
                out.address,
            )
        )
        return self.lab.read(out)

    def run(self, launches: Sequence[Launch]) -> None:
        self.lab.run(launches)


def assert_close(found: Array, wanted: Array, a: Array, weights: Array) -> None:
    """Within 2^-10 of the sum of |w x|."""
    exact = np.abs(a.astype(np.float64)) @ np.abs(weights.astype(np.float64)).T
    assert np.isfinite(found).all()
    assert (np.abs(found.astype(np.float64) - wanted) <= 2.0**-10 * (exact + 1)).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "rows"), SIZES)
def test_norms_and_products_of_odd_sizes(
    lab: Lab, dtype: DType, inputs: int, rows: tuple[int, ...]
) -> None:
    case = Case(lab, dtype, inputs, rows)
    weights, bias = np.concatenate(case.parts), np.concatenate(case.bias)
    a = gemm.normed(case.x, case.gain, EPS, case.dtype)
    wanted = gemm.product(a, weights, bias)
    first = case.normed(case.x[:1])[0]
    for tokens in TOKENS:
        found = case.normed(case.x[:tokens])
        assert_close(found, wanted[:tokens], a[:tokens], weights)
        assert np.array_equal(found[0], first), tokens


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("facts", "inputs"),
    [(None, 1024), (GPUS["RTX 3090"]._replace(multiprocessors=7), 1024), (None, 2560)],
)
def test_a_token_has_the_same_bits_in_any_place_beside_any_other(
    lab: Lab, dtype: DType, facts: GpuFacts | None, inputs: int
) -> None:
    case = Case(lab, dtype, inputs, (2048, 512))
    first = case.normed(case.x[:1])[0]
    if facts:
        case.products = Products(lab.programs, facts, case.dtype)
        case.products.use_scratch(case.scratch.address)
    for tokens in TOKENS:
        x = np.full((tokens, case.inputs), np.nan, np.float32)
        x[-1] = case.x[0]
        assert np.array_equal(case.normed(x)[-1], first), tokens


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [200, 3072])
def test_a_residual_and_its_tap(lab: Lab, dtype: DType, inputs: int) -> None:
    case = Case(lab, dtype, inputs, (72,))
    (weights,), stride = case.parts, 80
    before = np.random.default_rng(5).standard_normal((max(TOKENS), 72)).astype(np.float32)
    elements = case.x.astype(case.dtype)
    first: Array | None = None
    for tokens in TOKENS:
        a, x = lab.put(elements[:tokens]), lab.put(before[:tokens])
        tap = lab.poison((tokens, stride), case.dtype)
        weight = case.weights[0]._replace(bias=0)
        case.run(
            case.products.residual(
                a.address, weight, inputs, tokens, x.address, tap=(tap.address, stride)
            )
        )
        found = lab.read(x)
        wanted = before[:tokens] + gemm.product(elements[:tokens], weights)
        assert_close(found, wanted, elements[:tokens], weights)
        taken = lab.read(tap)
        assert np.array_equal(taken[:, :72], found.astype(case.dtype))
        assert np.isnan(taken[:, 72:].astype(np.float32)).all()
        first = found[0] if first is None else first
        assert np.array_equal(found[0], first), tokens


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [200, 1024])
def test_the_activation(lab: Lab, dtype: DType, inputs: int) -> None:
    case = Case(lab, dtype, inputs, (72, 72))
    gate, up = (weight._replace(bias=0) for weight in case.weights)
    a = gemm.normed(case.x, case.gain, EPS, case.dtype)
    first_sums, second_sums = (gemm.product(a, weights) for weights in case.parts)
    wanted = gemm.gated(first_sums, second_sums, case.dtype).astype(np.float64)
    slack = 2.0**-7 if dtype == "bfloat16" else 2.0**-9
    first: Array | None = None
    for tokens in TOKENS:
        x, out = lab.put(case.x[:tokens]), lab.poison((tokens, 72), case.dtype)
        case.run(
            case.products.gated(
                x.address, case.gain_address, EPS, gate, up, inputs, tokens, out.address
            )
        )
        found = lab.read(out)
        error = np.abs(found.astype(np.float64) - wanted[:tokens])
        assert (error <= slack * (np.abs(wanted[:tokens]) + 1)).all()
        first = found[0] if first is None else first
        assert np.array_equal(found[0], first), tokens


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "seq_len", "select_len"), [(1, 1, 1), (3, 4, 3), (2, 40, 17), (3, 30, 30)]
)
def test_the_head_takes_the_tokens_that_are_selected(
    lab: Lab, dtype: DType, rows: int, seq_len: int, select_len: int
) -> None:
    case = Case(lab, dtype, 1024, (5000,))
    (weights,) = case.parts
    random = np.random.default_rng(9)
    last = np.stack([random.permutation(seq_len)[:select_len] for _ in range(rows)])
    x = np.full((rows, seq_len, 1024), np.nan, np.float32)
    taken = case.x[: rows * select_len].reshape(rows, select_len, 1024)
    for row in range(rows):
        x[row, last[row]] = taken[row]
    given, places = lab.put(x), lab.put(last.astype(np.int64))
    a = gemm.normed(taken.reshape(-1, 1024), case.gain, EPS, case.dtype)
    weight, found = case.weights[0]._replace(bias=0), []
    # For few multiprocessors 5,000 rows are many: wide products take more than 32 tokens.
    for facts in (lab.facts, lab.facts._replace(multiprocessors=7)):
        products = Products(lab.programs, facts, case.dtype)
        products.use_scratch(case.scratch.address)
        logits = lab.poison((rows, select_len, 5000), np.float32)
        sizes = (1024, rows, seq_len, select_len, places.address, logits.address)
        case.run(products.head(given.address, case.gain_address, EPS, weight, *sizes))
        found.append(lab.read(logits).reshape(len(a), -1))
    assert_close(found[0], gemm.product(a, weights), a, weights)
    assert np.array_equal(found[0], found[1])


MOST = 300
SOME = (0, 7, 255, MOST - 1)
GROUPED = [(64, (64, 8)), (192, (128, 64, 40)), (1024, (640,)), (2560, (320, 72))]
"""Inputs and rows of matrices one below the other, of which each but the last has whole groups."""


@pytest.fixture(params=SHAPES, ids=lambda shape: "-".join(map(str, shape.tiles)))
def tiles(
    request: pytest.FixtureRequest, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GroupTiles]:
    """The only tiles that products of many tokens have."""
    if lab.facts.capability != (9, 0):
        pytest.skip("the instructions of four warps together are those of 9.0 alone")
    monkeypatch.setattr(product_tiles, "SHAPES", (request.param,))
    product_tiles.group_tiles.cache_clear()
    yield request.param.tiles
    product_tiles.group_tiles.cache_clear()


def case_of(lab: Lab, dtype: DType, inputs: int, rows: tuple[int, ...]) -> Case:
    case = Case(lab, dtype, inputs, rows)
    random = np.random.default_rng(3)
    case.x = random.standard_normal((MOST, inputs)).astype(np.float32)
    case.scratch = lab.poison((MOST, inputs), case.dtype)
    case.products.use_scratch(case.scratch.address)
    return case


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "rows"), GROUPED)
def test_tokens_have_the_bits_that_they_have_alone(
    lab: Lab, tiles: GroupTiles, dtype: DType, inputs: int, rows: tuple[int, ...]
) -> None:
    case = case_of(lab, dtype, inputs, rows)
    alone = {place: case.normed(case.x[place : place + 1])[0] for place in SOME}
    for tokens in (257, MOST):
        chosen = product_tiles.group_tiles(lab.facts, rows, inputs, tokens, gated=False)
        assert chosen == (None if inputs // 64 % tiles.shares else tiles)
        found = case.normed(case.x[:tokens])
        assert np.isfinite(found).all()
        for place in SOME:
            assert place >= tokens or np.array_equal(found[place], alone[place]), (tokens, place)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "rows"), [(128, 72), (128, 64), (1024, 320), (2560, 1024)])
def test_what_is_passed_on_has_the_bits_that_it_has_alone(
    lab: Lab, tiles: GroupTiles, dtype: DType, inputs: int, rows: int
) -> None:
    case = case_of(lab, dtype, inputs, (rows, rows))
    gate, up = (weight._replace(bias=0) for weight in case.weights)
    random = np.random.default_rng(4)
    values = (random.standard_normal((inputs, rows)) * rows**-0.5).astype(case.dtype)
    held = lab.put(values)
    down = Weight(held.address, inputs, gate.form)
    passed = case.products.stages(gate, up, down, inputs, MOST)
    assert passed == (rows % 64 == 0 and rows // 64 % tiles.shares == 0)

    def layer(x: Array, *, staged: bool) -> Array:
        """x and what comes of it by gate, up and down."""
        given, out = lab.put(x), lab.poison((len(x), rows), case.dtype)
        norm = (given.address, case.gain_address, EPS)
        case.run(
            (
                *case.products.gated(*norm, gate, up, inputs, len(x), out.address, staged=staged),
                *case.products.residual(
                    out.address, down, rows, len(x), given.address, staged=staged
                ),
            )
        )
        return lab.read(given)

    found = layer(case.x, staged=passed)
    assert np.isfinite(found).all()
    for place in SOME:
        alone = layer(case.x[place : place + 1], staged=False)[0]
        assert np.array_equal(found[place], alone), (tiles, place)


FORMS = [
    Form("int4", 32),
    Form("int4", 64),
    Form("int4", 128, zeros=True),
    Form("int4", 32, zeros=True),
    Form("int8", 32),
    Form("int8", 64, zeros=True),
    Form("int8", 128),
]


class QuantisedCase:
    """Matrices of integers one below the other on the GPU, and what they mean."""

    def __init__(
        self, lab: Lab, dtype: DType, form: Form, inputs: int, rows: tuple[int, ...]
    ) -> None:
        random = np.random.default_rng(inputs + form.block)
        self.lab, self.inputs, self.rows, self.dtype = lab, inputs, sum(rows), TYPES[dtype]
        self.products = Products(lab.programs, lab.facts, self.dtype)
        self.weights: list[Weight] = []
        self.parts: list[Array] = []
        self.held: list[Any] = []
        kind: Kind = "int8" if form.kind == "int8" else "int4"
        most = 2 * MIDDLE[kind]
        for count in rows:
            blocks = (count, inputs // form.block)
            integers = random.integers(0, most, (count, inputs), np.uint8)
            scales = (random.standard_normal(blocks) * 2 / most * inputs**-0.5).astype(self.dtype)
            scales.reshape(-1)[::7] = np.array(3e-7, self.dtype)  # products that are subnormal
            zeros = random.integers(0, most, blocks, np.uint8) if form.zeros else None
            self.parts.append(widen(Quantised(kind, integers, scales, zeros), self.dtype))
            bias = random.standard_normal(count).astype(self.dtype)
            stored = [pack(integers) if kind == "int4" else integers, scales, bias]
            held = [lab.put(one) for one in stored]
            zero = 0 if zeros is None else lab.put(zeros).address
            self.held += held
            values, scale, biases = (one.address for one in held)
            self.weights.append(Weight(values, count, form, scale, zero, biases))
        self.gain = random.uniform(0.5, 2, inputs).astype(self.dtype)
        self.x = random.standard_normal((max(TOKENS), inputs)).astype(np.float32)
        self.scratch = lab.poison((max(TOKENS), inputs), self.dtype)
        self.products.use_scratch(self.scratch.address)
        self.held.append(lab.put(self.gain))

    def plain(self, a: Array) -> Array:
        """Elements a times the matrices."""
        given = self.lab.put(a)
        out = self.lab.poison((len(a), self.rows), np.float32)
        bare = [weight._replace(bias=0) for weight in self.weights]
        self.lab.run(self.products.plain(given.address, bare, self.inputs, len(a), out.address))
        return self.lab.read(out)

    def normed(self, x: Array) -> Array:
        """The kernels' norm and product of rows x."""
        given = self.lab.put(x)
        out = self.lab.poison((len(x), self.rows), np.float32)
        gain = self.held[-1].address
        sizes = (self.inputs, len(x), out.address)
        self.lab.run(self.products.normed(given.address, gain, EPS, self.weights, *sizes))
        return self.lab.read(out)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tokens", [1, 384])
def test_every_weight_is_what_its_integer_means(
    lab: Lab, dtype: DType, form: Form, tokens: int
) -> None:
    """Inputs that are 1 in one place show the weights themselves, bit for bit."""
    case = QuantisedCase(lab, dtype, form, 384, (40, 16, 8))
    eye, wanted = np.eye(384, dtype=case.dtype), np.concatenate(case.parts).T
    found = np.concatenate([case.plain(eye[i : i + tokens]) for i in range(0, 384, tokens)])
    wrong = np.argwhere(found != wanted.astype(np.float32))
    assert not len(wrong), (len(wrong), wrong[:4], found[tuple(wrong[0])], wanted[tuple(wrong[0])])


@pytest.mark.parametrize(
    ("dtype", "form", "inputs", "rows"),
    [
        ("float16", Form("int4", 32), 896, (136, 64, 64)),
        ("bfloat16", Form("int4", 128, zeros=True), 2560, (264,)),
        ("float16", Form("int8", 128), 128, (24, 8)),
        ("bfloat16", Form("int8", 64), 1088, (40, 16)),
    ],
    ids=str,
)
def test_norms_and_quantised_products_of_odd_sizes(
    lab: Lab, dtype: DType, form: Form, inputs: int, rows: tuple[int, ...]
) -> None:
    case = QuantisedCase(lab, dtype, form, inputs, rows)
    weights = np.concatenate(case.parts)
    bias = np.concatenate([lab.read(one) for one in case.held[2:-1:3]])
    a = gemm.normed(case.x, case.gain, EPS, case.dtype)
    wanted = gemm.product(a, weights, bias)
    first = case.normed(case.x[:1])[0]
    for tokens in TOKENS:
        found = case.normed(case.x[:tokens])
        assert_close(found, wanted[:tokens], a[:tokens], weights)
        assert np.array_equal(found[0], first), tokens


@pytest.mark.parametrize("form", [Form("int4", 32), Form("int8", 128)], ids=str)
def test_a_token_has_the_same_bits_on_any_gpu_beside_any_other(lab: Lab, form: Form) -> None:
    case = QuantisedCase(lab, "float16", form, 1024, (2048, 520))
    first = case.normed(case.x[:1])[0]
    facts: tuple[GpuFacts, ...] = (lab.facts, GPUS["RTX 3090"]._replace(multiprocessors=7))
    for one in facts:
        case.products = Products(lab.programs, one, case.dtype)
        case.products.use_scratch(case.scratch.address)
        for tokens in TOKENS:
            x = np.full((tokens, case.inputs), np.nan, np.float32)
            x[-1] = case.x[0]
            assert np.array_equal(case.normed(x)[-1], first), (one, tokens)


@pytest.mark.parametrize("form", [Form("int8", 64), Form("int8", 32, zeros=True)], ids=str)
def test_bytes_have_the_sums_of_the_elements_that_they_mean(lab: Lab, form: Form) -> None:
    case = QuantisedCase(lab, "float16", form, 896, (264,))
    found = [case.plain(case.x[:tokens].astype(case.dtype)) for tokens in (1, 31, 130)]
    (part,) = case.parts
    held = lab.put(part)
    case.weights = [Weight(held.address, 264, Form("float16"))]
    for tokens, product in zip((1, 31, 130), found, strict=True):
        assert np.array_equal(case.plain(case.x[:tokens].astype(case.dtype)), product)


@pytest.mark.parametrize("form", FORMS[::4], ids=str)
def test_gates_and_residuals(lab: Lab, form: Form) -> None:
    case = QuantisedCase(lab, "float16", form, 1024, (72, 72))
    gate, up = (weight._replace(bias=0) for weight in case.weights)
    a = gemm.normed(case.x, case.gain, EPS, case.dtype)
    gates, ups = (gemm.product(a, part) for part in case.parts)
    wanted = gemm.gated(gates, ups, case.dtype).astype(np.float64)
    elements = case.x.astype(case.dtype)
    for tokens in (1, 8, 64, 130):
        x, out = lab.put(case.x[:tokens]), lab.poison((tokens, 72), case.dtype)
        made = case.products.gated(
            x.address, case.held[-1].address, EPS, gate, up, 1024, tokens, out.address
        )
        lab.run(made)
        error = np.abs(lab.read(out).astype(np.float64) - wanted[:tokens])
        assert (error <= 2.0**-9 * (np.abs(wanted[:tokens]) + 1)).all()
        before, inputs = np.ones((tokens, 72), np.float32), lab.put(elements[:tokens])
        stream = lab.put(before)
        lab.run(case.products.residual(inputs.address, gate, 1024, tokens, stream.address))
        product = gemm.product(elements[:tokens], case.parts[0])
        assert_close(lab.read(stream), 1 + product, elements[:tokens], case.parts[0])
