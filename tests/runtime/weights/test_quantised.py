from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hearth.runtime.weights.quantised import (
    MIDDLE,
    Kind,
    Quantised,
    pack,
    round_weights,
    unpack,
    widen,
)

WIDE = np.dtype(np.float32)
DTYPES = (WIDE, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
KINDS: tuple[Kind, ...] = ("int8", "int4")
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.sampled_from([16, 32, 64, 128, 256]))


def random_weights(
    seed: int, sizes: tuple[int, int, int], scale: float = 1.0
) -> NDArray[np.float32]:
    rows, blocks, block = sizes
    drawn = np.random.default_rng(seed).standard_normal((rows, blocks * block)) * scale
    return drawn.astype(np.float32)


def squared_errors(
    matrix: Quantised, weights: NDArray[np.float32], block: int
) -> NDArray[np.float32]:
    off = (widen(matrix, WIDE) - weights).reshape(len(weights), -1, block)
    errors: NDArray[np.float32] = np.square(off).sum(axis=-1)
    return errors


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=SIZES,
    kind=st.sampled_from(KINDS),
    size=st.floats(1e-6, 1e6),
    signed=st.booleans(),
)
def test_the_error_is_at_most_a_step_of_the_block(
    seed: int, sizes: tuple[int, int, int], kind: Kind, size: float, *, signed: bool
) -> None:
    weights = random_weights(seed, sizes, size)
    made = round_weights(weights, kind, sizes[2], WIDE, signed=signed)
    assert made.integers.shape == weights.shape
    assert made.scales.shape == sizes[:2]
    assert signed or (made.scales > 0).all()
    assert made.integers.max() < 2 * MIDDLE[kind]
    steps = np.abs(np.repeat(made.scales, sizes[2], axis=1))
    # What a scale of four bits clips is off by more, as it is fitted to the others.
    limit = 0.501 if kind == "int8" else 3
    assert (np.abs(widen(made, WIDE) - weights) <= steps * limit).all()


@given(seed=st.integers(0, 2**32 - 1), sizes=SIZES, signed=st.booleans())
def test_no_block_of_four_bits_is_worse_than_by_its_largest_magnitude(
    seed: int, sizes: tuple[int, int, int], *, signed: bool
) -> None:
    weights, block = random_weights(seed, sizes), sizes[2]
    made = round_weights(weights, "int4", block, WIDE, signed=signed)
    largest = np.abs(weights.reshape(*sizes)).max(axis=-1)
    steps = np.repeat(largest / np.float32(7), block, axis=1)
    plain = np.square(np.rint(weights / steps) * steps - weights).reshape(*sizes).sum(axis=-1)
    assert (squared_errors(made, weights, block) <= plain * 1.0001).all()


def test_scales_of_both_signs_fit_better() -> None:
    weights = random_weights(5, (64, 16, 32))
    errors = [
        squared_errors(round_weights(weights, "int4", 32, WIDE, signed=signed), weights, 32).sum()
        for signed in (False, True)
    ]
    assert errors[1] < 0.92 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_those_of_the_scale_as_it_is_stored(kind: Kind, dtype: np.dtype[Any]) -> None:
    weights = random_weights(7, (5, 3, 64))
    made = round_weights(weights, kind, 64, dtype, signed=True)
    assert made.scales.dtype == dtype
    steps = np.repeat(made.scales.astype(np.float32), 64, axis=1)
    middle = MIDDLE[kind]
    nearest = np.clip(np.rint(weights / steps), -middle, middle - 1) + middle
    assert (np.abs(nearest - made.integers) <= (np.abs(weights / steps % 1 - 0.5) < 1e-5)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("signed", [False, True])
def test_a_block_of_zeros_stays_zero(kind: Kind, *, signed: bool) -> None:
    made = round_weights(np.zeros((2, 32), np.float32), kind, 32, WIDE, signed=signed)
    assert (made.integers == MIDDLE[kind]).all()
    assert not made.scales.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37, 1e-9])
def test_the_smallest_numbers_become_as_small(
    kind: Kind, dtype: np.dtype[Any], size: float
) -> None:
    made = round_weights(np.full((1, 32), size, np.float32), kind, 32, dtype)
    assert np.isfinite(made.scales.astype(np.float32)).all()
    assert np.abs(widen(made, WIDE)).max() <= 2 * size


def test_a_scale_that_its_type_cannot_hold_is_infinite() -> None:
    made = round_weights(np.full((1, 32), 1e9, np.float32), "int8", 32, np.dtype(np.float16))
    assert np.isinf(made.scales).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_a_weight_is_integer_less_zero_point_times_scale_rounded_once(
    kind: Kind, dtype: np.dtype[Any], *, with_zeros: bool
) -> None:
    rng, most = np.random.default_rng(3), 2 * MIDDLE[kind]
    integers = rng.integers(0, most, (3, 96), np.uint8)
    scales = rng.standard_normal((3, 3)).astype(dtype)
    zeros = rng.integers(0, most, (3, 3), np.uint8) if with_zeros else None
    wide = widen(Quantised(kind, integers, scales, zeros), dtype)
    assert wide.dtype == dtype
    for row, column in np.ndindex(3, 96):
        block = (row, column // 32)
        zero = MIDDLE[kind] if zeros is None else int(zeros[block])
        exact = (int(integers[row, column]) - zero) * float(scales[block])
        assert wide[row, column] == np.array(exact).astype(dtype)


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 33))
def test_packed_integers_come_back(seed: int, rows: int, pairs: int) -> None:
    integers = np.random.default_rng(seed).integers(0, 16, (rows, 2 * pairs), np.uint8)
    packed = pack(integers)
    assert packed.shape == (rows, pairs)
    np.testing.assert_array_equal(unpack(packed), integers)


def test_the_first_of_two_fills_the_low_half() -> None:
    assert pack(np.array([1, 15, 7, 9], np.uint8)).tolist() == [0xF1, 0x97]
