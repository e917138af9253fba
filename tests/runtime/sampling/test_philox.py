import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.sampling.row_sampler import UniformSource, philox4x32, uniforms

# The known answers that the authors publish with their library (Random123, kat_vectors).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    found = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert found.tolist() == words


def test_counters_do_not_affect_one_another() -> None:
    key = np.array([3, 4], np.uint64)
    counters = np.arange(12, dtype=np.uint64).reshape(3, 4)
    together = philox4x32(counters, key)
    for counter, words in zip(counters, together, strict=True):
        assert philox4x32(counter, key).tolist() == words.tolist()


def test_a_uniform_is_the_high_bits_of_two_words() -> None:
    high, low = KNOWN[0][2][:2]
    expected = ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    assert uniforms(0, 0, 1)[0] == expected


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 300), max_size=8))
def test_the_number_of_a_position_depends_on_nothing_asked_before(
    seed: int, base: int, steps: list[int]
) -> None:
    source = UniformSource(seed)
    for step in steps:
        assert source.at(base + step) == uniforms(seed, base + step, 1)[0]


def test_seeds_and_positions_give_different_numbers() -> None:
    seeds = [0, 1, 2**32, 2**63 - 1]
    numbers = {number for seed in seeds for number in uniforms(seed, 0, 1000).tolist()}
    assert len(numbers) == 4000
    assert all(0 <= number < 1 for number in numbers)


def test_numbers_are_uniform() -> None:
    numbers = np.concatenate([uniforms(seed, 0, 1000) for seed in range(64)])
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = numbers.size / 64
    # 99.9% point of chi-square with 63 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 103.4
