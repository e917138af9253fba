"""Rotary position tables, computed on the host so that a graph knows no scaling kind."""

import math

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import RopeConfig

Array = NDArray[np.float32]


def rope_frequencies(rope: RopeConfig, rotary_dim: int) -> Array:
    """Radians per token of each rotated pair [rotary_dim / 2]; zero for type `none`.

    float32 throughout, as reference models compute it: the rounding of a frequency is multiplied
    by the position, so a more exact value would agree less.
    """
    if rope.type == "none":
        return np.zeros(rotary_dim // 2, np.float32)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    plain: Array = np.float32(1) / np.power(np.float32(rope.theta), exponents)
    if rope.type == "linear":
        stretched: Array = plain / np.float32(rope.factor)
        return stretched
    if rope.type == "llama3":
        return _scale_llama3(plain, rope)
    return plain


def rope_tables(rope: RopeConfig, rotary_dim: int, positions: int) -> tuple[Array, Array]:
    """Cosine and sine [positions, rotary_dim / 2] for positions 0, 1, 2 ..."""
    index = np.arange(positions, dtype=np.float32)
    angles = index[:, None] * rope_frequencies(rope, rotary_dim)[None, :]
    return np.cos(angles), np.sin(angles)


def _scale_llama3(plain: Array, rope: RopeConfig) -> Array:
    # The rule published with Llama 3.1: long waves are stretched by the factor, short ones are
    # kept, and those between the two limits are blended by how often they fit the old length.
    length = rope.original_max_position_embeddings
    wave = np.float32(2 * math.pi) / plain
    turns = np.float32(length) / wave
    blend = (turns - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = plain / np.float32(rope.factor)
    mixed = (1 - blend) * stretched + blend * plain
    long = wave > length / rope.low_freq_factor
    short = wave < length / rope.high_freq_factor
    return np.where(long, stretched, np.where(short, plain, mixed)).astype(np.float32)
