import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.export.quantize import pack_int4, quantize_rows

BLOCK = 16
BOUNDS = {"int8": (-127, 127), "int4": (-8, 7)}


def random_rows(seed: int, size: float = 1.0) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((3 * BLOCK, 5)) * size
    return rows.astype(np.float32)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["int8", "int4"]), st.floats(1e-6, 1e6))
def test_the_error_is_at_most_a_step_of_the_block(seed: int, bits: str, size: float) -> None:
    rows = random_rows(seed, size)
    integers, scales = quantize_rows(rows, bits, BLOCK)
    assert scales.shape == (3, 5)
    assert (scales > 0).all()
    low, high = BOUNDS[bits]
    assert low <= integers.min() < integers.max() <= high
    steps = np.repeat(scales, BLOCK, axis=0)
    # The clipped magnitude of a four-bit block is off by up to one step, all else by half.
    limit = 0.501 if bits == "int8" else 1.001
    assert (np.abs(integers * steps - rows) <= steps * limit).all()


@given(st.integers(0, 2**32 - 1))
def test_no_four_bit_block_is_worse_than_by_its_largest_magnitude(seed: int) -> None:
    rows = random_rows(seed)
    integers, scales = quantize_rows(rows, "int4", BLOCK)
    plain = np.abs(rows.reshape(3, BLOCK, 5)).max(axis=1) / np.float32(7)
    errors = []
    for step in (scales, plain):
        steps = np.repeat(step, BLOCK, axis=0)
        rounded = integers if step is scales else np.rint(rows / steps)
        errors.append(((rounded * steps - rows) ** 2).reshape(3, BLOCK, 5).sum(axis=1))
    assert (errors[0] <= errors[1] * 1.0001).all()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_block_of_zeros_stays_zero(bits: str) -> None:
    integers, scales = quantize_rows(np.zeros((BLOCK, 2), np.float32), bits, BLOCK)
    assert not integers.any()
    assert not scales.any()


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37])
def test_the_smallest_numbers_become_zero(bits: str, size: float) -> None:
    integers, scales = quantize_rows(np.full((BLOCK, 1), size, np.float32), bits, BLOCK)
    assert np.isfinite(scales).all()
    assert np.abs(integers * scales).max() <= 2 * size


def test_the_earlier_integer_fills_the_low_half() -> None:
    integers = np.array([[1, -1], [7, -7]], np.int8)
    assert pack_int4(integers).tolist() == [0xF1, 0x97]
