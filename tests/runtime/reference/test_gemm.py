import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.reference import gemm


@pytest.mark.parametrize("inputs", [8, 64, 72, 520, 1024, 9728])
def test_segments_are_whole_blocks_in_order(inputs: int) -> None:
    parts = gemm.segments(inputs)
    assert len(parts) == 8
    covered = [place for part in parts for place in range(part.start, part.stop)]
    assert covered == list(range(inputs))
    assert all(part.start % 64 == 0 for part in parts if part.start < part.stop)


def test_a_product_and_its_bias() -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((3, 200)).astype(np.float16)
    weights = random.standard_normal((16, 200)).astype(ml_dtypes.bfloat16)
    bias = random.standard_normal(16).astype(np.float16)
    found = gemm.product(a, weights, bias)
    exact = a.astype(np.float64) @ weights.astype(np.float64).T + bias
    assert found.dtype == np.float32
    assert np.allclose(found, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("inputs", [8, 72, 520, 1024])
def test_a_norm(inputs: int) -> None:
    x = np.random.default_rng(1).standard_normal((3, inputs)).astype(np.float32)
    assert np.allclose(gemm.squares(x), np.square(x.astype(np.float64)).sum(1), rtol=1e-6)
    gain = np.linspace(0.5, 2, inputs).astype(np.float16)
    found = gemm.normed(x, gain, 1e-6, np.dtype(np.float16))
    exact = x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-6) * gain
    assert found.dtype == np.float16
    assert np.allclose(found, exact, rtol=2**-10)


def test_the_activation() -> None:
    gate, up = np.array([-3.0, 0.0, 2.0], np.float32), np.array([1.0, 5.0, -2.0], np.float32)
    found = gemm.gated(gate, up, np.dtype(np.float16))
    assert np.allclose(found, [-0.14228, 0.0, -3.52319], rtol=2**-10)
