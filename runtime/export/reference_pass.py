"""Forward pass of a model of the served family, from token ids to logits, in NumPy.

This is the specification, to be read from top to bottom: the graphs of every dialect, and the
engines that are built of them, compute the same. It knows no cache and no chunk; sequences of one
length go through the layers at once. T is that length, H the hidden size, D that of a head, and the
dots are the sequences, which are independent of each other.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hearth.runtime.export.layout import EMBEDDING, HEAD
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.rounded_weights import RoundedWeights
from hearth.runtime.rope import rope_tables

Array = NDArray[np.float32]


def reference_logits(model: ModelConfig, weights: RoundedWeights, token_ids: ArrayLike) -> Array:
    """The logits [..., T, V] that rank the successors of tokens [..., T], computed in float32."""
    rotary = rope_tables(model.rope, model.rotary_dim, np.shape(token_ids)[-1])
    return decode(model, weights, weights.embed(EMBEDDING, token_ids), rotary)


def decode(
    model: ModelConfig,
    weights: RoundedWeights,
    x: Array,
    rotary: tuple[Array, Array],
    deepstack: Sequence[Array] = (),
) -> Array:
    """The logits [..., T, V] of embedded tokens x [..., T, H], some of them perhaps of images.

    `rotary` are cosines and sines as `rotate` takes them; `deepstack` [..., T, H] each is what is
    added behind the first layers (Meng et al., DeepStack, 2024).
    """
    for layer in range(model.num_layers):
        name = f"model.layers.{layer}"
        normal = normalise(x, weights.vector(f"{name}.input_layernorm.weight"), model)
        x = x + attention(normal, model, weights, f"{name}.self_attn", rotary)
        normal = normalise(x, weights.vector(f"{name}.post_attention_layernorm.weight"), model)
        x = x + gated_mlp(normal, model, weights, f"{name}.mlp")
        if layer < len(deepstack):
            x = x + deepstack[layer]
    x = normalise(x, weights.vector("model.norm.weight"), model)
    # A tied head is the embedding table, read the other way.
    return weights.project(x, EMBEDDING if model.tied_head else HEAD)


def normalise(x: Array, weight: Array, model: ModelConfig) -> Array:
    """Divide by the root mean square over the last axis, and multiply by a weight.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normal: Array = x / np.sqrt(mean_square + np.float32(model.rms_norm_eps)) * weight
    return normal


def attention(
    x: Array, model: ModelConfig, weights: RoundedWeights, name: str, rotary: tuple[Array, Array]
) -> Array:
    """Causal attention of x [..., T, H]: each token sees itself and those before it.

    Query heads share key and value heads in groups of neighbours (Ainslie et al., GQA, 2023).
    """
    q, k, v = (
        heads(linear(x, weights, f"{name}.{kind}_proj", biased=model.attention_bias), model)
        for kind in "qkv"
    )
    if model.qk_norm:
        q = normalise(q, weights.vector(f"{name}.q_norm.weight"), model)
        k = normalise(k, weights.vector(f"{name}.k_norm.weight"), model)
    q, k = rotate(q, *rotary), rotate(k, *rotary)
    group = model.num_attention_heads // model.num_kv_heads
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scores = q @ k.swapaxes(-1, -2) * np.float32(model.head_dim**-0.5)
    later = np.triu(np.ones(scores.shape[-2:], np.bool_), 1)
    shares = softmax(np.where(later, np.float32(-np.inf), scores))
    with np.errstate(divide="ignore"):  # A flag that NumPy's BLAS leaves behind on arm64.
        context = shares @ v
    joined = context.swapaxes(-2, -3).reshape(*x.shape[:-1], model.query_size)
    return linear(joined, weights, f"{name}.o_proj", biased=model.output_bias)


def linear(x: Array, weights: RoundedWeights, name: str, *, biased: bool) -> Array:
    """A projection of x [..., T, in], with its bias if it has one: [..., T, out]."""
    product = weights.project(x, f"{name}.weight")
    return product + weights.vector(f"{name}.bias") if biased else product


def heads(x: Array, model: ModelConfig) -> Array:
    """The heads [..., heads, T, D] that lie side by side in x [..., T, heads * D]."""
    parts: Array = x.reshape(*x.shape[:-1], -1, model.head_dim).swapaxes(-2, -3)
    return parts


def rotate(heads: Array, cos: Array, sin: Array) -> Array:
    """Turn pairs of elements of each head [..., heads, T, D] by the angles of its position.

    `cos` and `sin` [T, R / 2], or [..., 1, T, R / 2] where each sequence has its own, turn the
    first R elements, element i with element i + R / 2; the others stay. Su et al., RoFormer, 2021;
    the scalings of its angles are in `hearth.runtime.rope`.
    """
    half = cos.shape[-1]
    one, other, rest = np.split(heads, [half, 2 * half], axis=-1)
    return np.concatenate((one * cos - other * sin, other * cos + one * sin, rest), axis=-1)


def softmax(scores: Array) -> Array:
    """Weights that add up to 1 over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def gated_mlp(x: Array, model: ModelConfig, weights: RoundedWeights, name: str) -> Array:
    """Two projections of x [..., T, H], one gating the other through SiLU, and a third back.

    Shazeer, GLU Variants Improve Transformer, 2020.
    """
    gate = linear(x, weights, f"{name}.gate_proj", biased=model.mlp_bias)
    up = linear(x, weights, f"{name}.up_proj", biased=model.mlp_bias)
    silu = gate / (1 + np.exp(-gate))
    return linear(silu * up, weights, f"{name}.down_proj", biased=model.mlp_bias)
