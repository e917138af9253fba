from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.executor.kernels.products import Form, Products, Weight
from hearth.runtime.reference import gemm
from hearth.runtime.weights.quantised import MIDDLE, Kind, Quantised, pack, widen
from tests.runtime.executor.kernels.lab import TYPES, Lab
from tests.runtime.executor.kernels.model_shapes import GPUS
from tests.runtime.executor.kernels.test_product_sums import EPS, TOKENS, assert_close

pytestmark = pytest.mark.gpu
Array = NDArray[Any]
FORMS = [
    Form("int4", 32),
    Form("int4", 64),
    Form("int4", 128, zeros=True),
    Form("int4", 32, zeros=True),
    Form("int8", 32),
    Form("int8", 64, zeros=True),
    Form("int8", 128),
]


class Case:
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
    case = Case(lab, dtype, form, 384, (40, 16, 8))
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
def test_norms_and_products_of_odd_sizes(
    lab: Lab, dtype: DType, form: Form, inputs: int, rows: tuple[int, ...]
) -> None:
    case = Case(lab, dtype, form, inputs, rows)
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
    case = Case(lab, "float16", form, 1024, (2048, 520))
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
    case = Case(lab, "float16", form, 896, (264,))
    found = [case.plain(case.x[:tokens].astype(case.dtype)) for tokens in (1, 31, 130)]
    (part,) = case.parts
    held = lab.put(part)
    case.weights = [Weight(held.address, 264, Form("float16"))]
    for tokens, product in zip((1, 31, 130), found, strict=True):
        assert np.array_equal(case.plain(case.x[:tokens].astype(case.dtype)), product)


@pytest.mark.parametrize("form", FORMS[::4], ids=str)
def test_gates_and_residuals(lab: Lab, form: Form) -> None:
    case = Case(lab, "float16", form, 1024, (72, 72))
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
