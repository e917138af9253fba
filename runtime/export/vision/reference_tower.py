"""What a vision tower computes, from patches to embeddings, in NumPy: the specification.

T is the number of patches, H the hidden size, and the dots are passes that do not hear of each
other.
"""

from collections.abc import Sequence
from math import erf

import numpy as np
from numpy.typing import NDArray

from runtime.export.reference_pass import rotate, softmax
from runtime.export.rounded_weights import RoundedWeights
from runtime.export.vision.layout import Merger, has_bias, tower_names
from runtime.export.vision.tower_model import TowerModel
from runtime.vision.tower_inputs import Segment, tower_inputs

Array = NDArray[np.float32]
_erf = np.vectorize(erf, otypes=[np.float32])


def reference_outputs(
    tower: TowerModel,
    weights: RoundedWeights,
    patches: NDArray[np.uint8],
    segments: Sequence[Segment],
) -> list[Array]:
    """Embeddings [..., tokens, output size] of patches [..., T, patch bytes], then deepstack's."""
    config, names = tower.config, tower_names(tower)
    given = tower_inputs(segments, config)
    x = linear(pixels(patches, tower), tower, weights, names.patch)
    if names.positions is not None:
        rows = weights.table(f"{names.positions}.weight")[given["position_ids"]]
        if "position_weights" in given:
            rows = rows * given["position_weights"][..., None]
        x = x + rows.sum(axis=0)
    merger, *mergers = names.mergers
    features: list[Array] = []
    for layer in range(config.num_layers):
        windows = config.window_size and layer not in config.full_attention_layers
        groups = given["window_ids" if windows else "segment_ids"]
        name = names.layer.format(layer)
        normal = normalise(x, tower, weights, f"{name}.{names.norms[0]}")
        parts = [linear(normal, tower, weights, f"{name}.{part}") for part in names.qkv]
        context = attention(np.concatenate(parts, -1), groups, given, tower)
        x = x + linear(context, tower, weights, f"{name}.{names.attended}")
        normal = normalise(x, tower, weights, f"{name}.{names.norms[1]}")
        x = x + mlp(normal, tower, weights, [f"{name}.{part}" for part in names.mlp])
        if layer in config.deepstack_layers:
            features.append(merge(x, tower, weights, mergers[len(features)]))
    return [merge(x, tower, weights, merger), *features]


def pixels(patches: NDArray[np.uint8], tower: TowerModel) -> Array:
    """Colours of patches, which come one behind the other, scaled and normalised."""
    rules = tower.config.rules
    mean, std = (np.array(one, np.float32)[:, None] for one in (rules.mean, rules.std))
    colours = patches.reshape(*patches.shape[:-1], 3, -1) * np.float32(rules.scale)
    normal: Array = ((colours - mean) / std).reshape(patches.shape)
    return normal


def linear(x: Array, tower: TowerModel, weights: RoundedWeights, name: str) -> Array:
    """A product with its bias, if it has one."""
    product = weights.project(x, f"{name}.weight")
    return product + weights.vector(f"{name}.bias") if has_bias(tower, name) else product


def normalise(x: Array, tower: TowerModel, weights: RoundedWeights, name: str) -> Array:
    """Layer normalisation; of Qwen2.5-VL by the root mean square."""
    epsilon, bias = np.float32(tower.norm_eps), np.float32(0)
    if has_bias(tower, name):
        x, bias = x - x.mean(axis=-1, keepdims=True), weights.vector(f"{name}.bias")
    root = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon)
    normal: Array = x / root * weights.vector(f"{name}.weight") + bias
    return normal


def attention(
    qkv: Array, groups: NDArray[np.int64], given: dict[str, Array], tower: TowerModel
) -> Array:
    """Attention among the patches of one of `groups` [T], of projections [..., T, 3H]."""
    config = tower.config
    shape = (*qkv.shape[:-1], 3, config.num_heads, config.head_dim)
    q, k, v = np.moveaxis(qkv.reshape(shape), -3, 0).swapaxes(-2, -3)
    if "rotary_cos" in given:
        q, k = (rotate(one, given["rotary_cos"], given["rotary_sin"]) for one in (q, k))
    scores = q @ k.swapaxes(-1, -2) * np.float32(config.head_dim**-0.5)
    apart = groups[:, None] != groups
    context = softmax(np.where(apart, np.float32(-np.inf), scores)) @ v
    joined: Array = context.swapaxes(-2, -3).reshape(*qkv.shape[:-1], config.hidden_size)
    return joined


def mlp(x: Array, tower: TowerModel, weights: RoundedWeights, names: Sequence[str]) -> Array:
    """Up and down, or gate, up and down."""
    *ups, down = names
    inner = linear(x, tower, weights, ups[0])
    if tower.is_gated:
        inner = inner / (1 + np.exp(-inner)) * linear(x, tower, weights, ups[1])
    elif tower.activation == "gelu_tanh":
        slope = np.float32((2 / np.pi) ** 0.5) * (inner + np.float32(0.044715) * inner**3)
        inner = inner * (1 + np.tanh(slope)) / 2
    else:
        inner = gelu(inner)
    return linear(inner, tower, weights, down)


def merge(x: Array, tower: TowerModel, weights: RoundedWeights, merger: Merger) -> Array:
    """Tokens [..., T / merge^2, output size] of the patches of each."""
    together = (*x.shape[:-2], -1, tower.merged_size)
    if merger.joins:
        x = normalise(x.reshape(together), tower, weights, merger.norm)
    else:
        x = normalise(x, tower, weights, merger.norm).reshape(together)
    *inner, last = merger.products
    for name in inner:
        x = gelu(linear(x, tower, weights, name))
    return linear(x, tower, weights, last)


def gelu(x: Array) -> Array:
    """Hendrycks and Gimpel, Gaussian Error Linear Units, 2016."""
    active: Array = x * (1 + _erf(x * np.float32(0.5**0.5))) / 2
    return active
