from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.executor.kernels.adapters import Adapter
from hearth.runtime.executor.kernels.products import Form, Products, Weight
from tests.runtime.executor.kernels.lab import TYPES, Lab

pytestmark = pytest.mark.gpu
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
