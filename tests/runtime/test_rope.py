import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.config import RopeConfig
from hearth.runtime.rope import rope_frequencies, rope_tables

LLAMA3 = RopeConfig(
    type="llama3",
    theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def test_frequencies_fall_from_one_to_almost_the_inverse_of_theta() -> None:
    frequencies = rope_frequencies(RopeConfig(theta=10_000.0), 8)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = rope_frequencies(RopeConfig(), 16)
    scaled = rope_frequencies(RopeConfig(type="linear", factor=4.0), 16)
    np.testing.assert_array_equal(scaled, plain / np.float32(4))


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    plain = rope_frequencies(RopeConfig(theta=LLAMA3.theta), 32)
    ratio = rope_frequencies(LLAMA3, 32) / plain
    waves = 2 * math.pi / plain
    assert (ratio[waves < 16] == 1).all()
    np.testing.assert_allclose(ratio[waves > 64], 1 / 8, rtol=1e-6)
    between = ratio[(waves > 16) & (waves < 64)]
    assert between.size > 0
    assert ((between > 1 / 8) & (between < 1)).all()


def test_no_rotation_means_cosine_one_and_sine_zero() -> None:
    cos, sin = rope_tables(RopeConfig(type="none"), 8, 5)
    assert (cos == 1).all()
    assert (sin == 0).all()


@given(st.integers(1, 64), st.integers(1, 40))
def test_tables_are_unit_rotations_that_begin_at_rest(half: int, positions: int) -> None:
    cos, sin = rope_tables(RopeConfig(), 2 * half, positions)
    assert cos.shape == sin.shape == (positions, half)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-5)
    assert (cos[0] == 1).all()


@pytest.mark.reference
@pytest.mark.parametrize("rope", [RopeConfig(theta=1e6), LLAMA3], ids=["default", "llama3"])
def test_tables_equal_those_of_transformers(rope: RopeConfig) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415 - as above

    parameters = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        parameters |= {name: getattr(rope, name) for name in names}
        parameters["original_max_position_embeddings"] = 64
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=parameters
    )
    positions = torch.arange(4096)[None]
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    for ours, table in zip(rope_tables(rope, 128, 4096), theirs, strict=True):
        np.testing.assert_allclose(ours, table[0, :, :64].numpy(), atol=3e-4)
