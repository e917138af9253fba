from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.config import DType
from runtime.executor.kernels.adapters import Added, Shrink
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
        added = Added(out.address, 0, self.rank.address, 3 * MOST, MOST)
        x = self.lab.put(self.x[first : first + tokens])
        norm = (gain, EPS) if self.is_normed else None
        shrink = Shrink(self.lab.programs, self.dtype)
        self.lab.run([shrink.launch(x.address, a, added, (self.inputs, tokens), norm)])
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
