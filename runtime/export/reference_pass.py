"""Forward pass of a model of the served family, from token ids to logits, in NumPy.

`decode` is the specification, to be read with all behind it: the graphs of every dialect, and the
engines that are built of them, compute the same. It knows no cache and no chunk; sequences of one
length go through the layers at once. T is that length, H the hidden size, D that of a head, and the
dots are the sequences, which are independent of each other. Before it stand the tables and the
weights that it reads, rounded as an engine has them.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hearth.runtime.config import LLMEngineRunnerConfig, Quantization, RopeConfig
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.layout import EMBEDDING, HEAD
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.weights import (
    TILE_BYTES,
    cast,
    in_threads,
    quantised,
    reads_as_stored,
    round_weights,
    widen,
)
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision_config import VisionConfig

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


_WIDE = np.dtype(np.float32)


class RoundedWeights:
    """Reads tensors of a checkpoint, of matrices some megabytes at a time.

    `read` gets the bytes of each piece of a matrix, once it is used, in float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LLMEngineRunnerConfig | VisionConfig,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._body, self._head = config.weight_quantization, config.head_weights
        self._signed = reads_as_stored(config)
        self._block_size = config.weight_block_size
        self._dtype = self._table = numpy_dtype(config.dtype)
        if isinstance(config, LLMEngineRunnerConfig) and config.embedding_dtype is not None:
            self._table = numpy_dtype(config.embedding_dtype)
        self._cuda = config.device == "cuda"
        self._read = read

    def vector(self, name: str) -> Array:
        """A vector, as norms and biases are."""
        return self._rounded(self._checkpoint.vector(name), name)

    def embed(self, name: str, token_ids: ArrayLike) -> Array:
        """Rows of an embedding table: [..., H]."""
        ids = np.asarray(token_ids)
        rows = [self._checkpoint.matrix(name, slice(i, i + 1), slice(None)) for i in ids.flat]
        stored = cast(np.concatenate(rows), self._table, name)
        return self._rounded(stored, name).reshape(*ids.shape, -1)

    def table(self, name: str) -> Array:
        """A whole matrix, as that of learned positions is."""
        return self._rounded(self._checkpoint.matrix(name, slice(None), slice(None)), name)

    def project(self, x: Array, name: str) -> Array:
        """The product of x [..., in] and a projection's matrix [out, in]: [..., out]."""
        rows, columns = self._checkpoint.shape(name)[0], x.shape[-1]
        inputs = x.reshape(-1, columns)
        product = np.empty((len(inputs), rows), np.float32)
        height = max(1, TILE_BYTES // (columns * 4))
        parts = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]

        def tile(part: slice) -> Array:
            return self._projection(self._checkpoint.matrix(name, part, slice(None)), name)

        tiles = in_threads(tile, parts) if len(parts) > 1 else map(tile, parts)
        for part, weights in zip(parts, tiles, strict=True):
            product[:, part] = (weights @ inputs.T).T
            self._read(weights.nbytes)
        return product.reshape(*x.shape[:-1], rows)

    def rounded_inputs(self, x: Array) -> Array:
        """Round x [..., in] as a product does: of quantised weights on a CPU to 8 bits a block."""
        if self._body == "none" or self._cuda:
            rounded = x.astype(self._dtype).astype(np.float32)
            # A CPU keeps float32 from one operator to the next.
            return rounded if self._cuda else np.where(np.isfinite(rounded), rounded, x)
        rows = x.reshape(-1, x.shape[-1])
        blocks = round_weights(rows, "int8", self._block_size, _WIDE)
        return widen(blocks, _WIDE).reshape(x.shape)

    def _projection(self, matrix: NDArray[np.generic], name: str) -> Array:
        """Some rows of a projection; a CPU keeps the dequantised weights in float32."""
        kind: Quantization = self._head if name in (HEAD, EMBEDDING) else self._body
        if kind == "none":
            return self._rounded(matrix, name)
        made = quantised(matrix, kind, self._block_size, self._dtype, name, signed=self._signed)
        wide = widen(made, self._dtype if self._cuda else _WIDE)
        return wide.astype(np.float32, copy=False)

    def _rounded(self, array: NDArray[np.generic], name: str) -> Array:
        rounded: Array = cast(array, self._dtype, name).astype(np.float32, copy=False)
        return rounded


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
    the scalings of its angles are in `rope_frequencies`.
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
