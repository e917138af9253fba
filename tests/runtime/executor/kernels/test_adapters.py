from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.config import DType
from runtime.executor.kernels.adapters import Adapter, Shrink
from runtime.executor.kernels.products import Form, Products, Weight
from runtime.tensors.tensor import Tensor
from tests.runtime.executor.kernels.lab import EPSILON, TYPES, Lab

pytestmark = pytest.mark.gpu
EPS = 1e-6
MOST = 16


class Case:
    """Tokens, and a slot of an adapter of rank 11 for three matrices."""

    def __init__(self, lab: Lab, inputs: int, dtype: DType, *, is_normed: bool) -> None:
        rng, kind = np.random.default_rng(inputs), TYPES[dtype]
        self.lab, self.inputs, self.dtype, self.is_normed = lab, inputs, dtype, is_normed
        self.x: NDArray[Any] = rng.standard_normal((37, inputs)).astype(
            np.float32 if is_normed else kind
        )
        self.gain = rng.uniform(0.5, 1.5, inputs).astype(kind)
        self.a = rng.standard_normal((inputs, 3 * MOST)).astype(kind)
        self.rank = lab.put(np.array([11], np.int32))
        self.on_gpu = [lab.put(one) for one in (self.gain, self.a)]

    def run(self, first: int, tokens: int) -> NDArray[Any]:
        out: Tensor = self.lab.poison((tokens, 3 * MOST), np.float32)
        gain, a = (one.address for one in self.on_gpu)
        adapter = Adapter(a, 0, self.rank.address, out.address, 3 * MOST, MOST)
        x = self.lab.put(self.x[first : first + tokens])
        norm = (gain, EPS) if self.is_normed else None
        shrink = Shrink(self.lab.programs, bfloat=int(self.dtype == "bfloat16"))
        self.lab.run([shrink.launch(x.address, adapter, (self.inputs, tokens), norm)])
        return self.lab.read(out)

    def wanted(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The products, and the sums of their parts' magnitudes."""
        x, a = self.x.astype(np.float64), self.a.astype(np.float64)
        if self.is_normed:
            x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * self.gain.astype(np.float64)
        return x @ a, np.abs(x) @ np.abs(a)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("inputs", [8, 248, 1024, 3072, 3336, 9728])
def test_the_first_product_of_an_adapter_is_that_of_numpy(
    lab: Lab, inputs: int, dtype: DType, *, is_normed: bool
) -> None:
    case = Case(lab, inputs, dtype, is_normed=is_normed)
    wanted, magnitudes = case.wanted()
    found = case.run(0, 37)
    bound = magnitudes * (EPSILON[dtype] if is_normed else 1e-6) + 1e-6
    assert (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize("is_normed", [True, False])
def test_a_token_is_the_same_in_every_step(lab: Lab, *, is_normed: bool) -> None:
    case = Case(lab, 1032, "bfloat16", is_normed=is_normed)
    found = case.run(0, 37)
    for first, tokens in ((0, 1), (3, 1), (5, 2), (4, 3), (30, 7), (9, 8), (2, 20)):
        assert case.run(first, tokens).tobytes() == found[first : first + tokens].tobytes()


def test_columns_beyond_the_rank_are_left_alone(lab: Lab) -> None:
    case = Case(lab, 64, "float16", is_normed=False)
    case.rank = lab.put(np.array([3], np.int32))
    found = case.run(0, 5)
    assert (np.isnan(found) == (np.arange(3 * MOST) % MOST >= 8)).all()


ROWS = (40, 24, 24)


class Layer:
    """A product of 80 tokens with an adapter, in each of its kinds."""

    def __init__(self, lab: Lab, kind: str, dtype: DType) -> None:
        self.lab, self.kind, self.dtype = lab, kind, TYPES[dtype]
        self.rng = np.random.default_rng(5)
        self.inputs, self.most = 328, 8
        self.matrices = {"normed": ROWS, "residual": (72,), "gated": (72, 72)}[kind]
        width, all_rows = len(self.matrices) * self.most, sum(self.matrices)
        self.x = self._numbers((80, self.inputs), wide=kind != "residual")
        self.before = self._numbers((80, all_rows), wide=True)
        self.gain = lab.put(self._numbers((self.inputs,)))
        self.weights = [self._numbers((rows, self.inputs)) for rows in self.matrices]
        self.bias = self._numbers((self.matrices[0],))
        self.a = self._numbers((self.inputs, width))
        self.b = self._numbers((width, all_rows))
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
        shrunk = lab.poison((tokens, self.a.shape[1]), np.float32).address
        adapter = None
        if rank is not None:
            told = lab.put(np.array([rank], np.int32)).address
            adapter = Adapter(a, b, told, shrunk, self.a.shape[1], self.most)
        kept = {"normed": sum(self.matrices), "residual": 72, "gated": 72}[self.kind]
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
            columns = slice(first, first + len(matrix))
            low = self.a[:, ranks].astype(np.float64) @ self.b[ranks, columns].astype(np.float64)
            parts.append(x @ (matrix.astype(np.float64).T + low))
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["normed", "residual", "gated"])
def test_a_product_adds_what_its_adapter_says_for_any_number_of_tokens(
    lab: Lab, kind: str, dtype: DType
) -> None:
    layer = Layer(lab, kind, dtype)
    assert np.array_equal(layer.run(0, 80, 0), layer.run(0, 80, None))
    for rank in (3, 8):
        found, wanted = layer.run(0, 80, rank), layer.wanted(rank)
        away = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert away < (2e-2 if dtype == "bfloat16" else 3e-3)
        for first, tokens in ((0, 1), (3, 1), (5, 8), (7, 9), (10, 33), (2, 64), (1, 70)):
            alone = layer.run(first, tokens, rank)
            assert np.array_equal(alone, found[first : first + tokens]), (first, tokens)
