from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch
from hearth.runtime.executor.kernels.products import Form, Products, Weight
from hearth.runtime.reference import gemm
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
