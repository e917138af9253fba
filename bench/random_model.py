"""A Hugging Face folder in the shape of Qwen3: random weights, a vocabulary without meaning."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Weights = dict[str, NDArray[Any]]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Qwen3 decoder with a tied head; the defaults are those of Qwen3-0.6B."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 151_936


SHAPE_06B = Shape()
SHAPE_4B = Shape(layers=36, hidden=2560, heads=32, intermediate=9728)
QUICK_SHAPE = Shape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=128, vocabulary=512
)
_LAYERS_PER_SHARD = 7
_POOL = (1 << 24) - 3
"""Values of a pool; an odd number, so that the rows of a matrix do not repeat with it."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 258
"""The id of `<|im_end|>`, which ends a turn."""

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Normals:
    """Standard normal numbers; `pooled` ones come from random places of one pool.

    A pool makes gigabytes of weights in the time of a copy. Its numbers repeat, which the speed
    of a matrix product does not notice.
    """

    def __init__(self, seed: int, *, pooled: bool) -> None:
        self._rng = np.random.default_rng(seed)
        self._pool = self._rng.standard_normal(_POOL, dtype=np.float32) if pooled else None
        self._stored: dict[tuple[float, float], NDArray[Any]] = {}

    def draw(self, *shape: int, width: float, middle: float = 0.0) -> NDArray[Any]:
        """An array of `shape`, in bfloat16: so wide, around a middle."""
        if self._pool is None:
            return _stored(self._rng.standard_normal(shape, dtype=np.float32), width, middle)
        pool = self._stored.get((width, middle))
        if pool is None:
            pool = self._stored[width, middle] = _stored(self._pool, width, middle)
        start = int(self._rng.integers(pool.size))
        count = math.prod(shape)
        if start + count <= pool.size:
            return pool[start : start + count].reshape(shape)
        return np.resize(np.concatenate([pool[start:], pool[:start]]), shape)


def _stored(values: NDArray[np.float32], width: float, middle: float) -> NDArray[Any]:
    scaled = values * np.float32(width)
    return np.asarray(middle + scaled if middle else scaled, dtype=ml_dtypes.bfloat16)


def write_random_model(
    folder: Path,
    shape: Shape,
    *,
    seed: int = 0,
    pooled: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write config, tokenizer and bfloat16 shards; the folder appears only when it is whole.

    `progress` gets (shards written, shards in all). The weights depend on `seed`,
    `shape` and `pooled` (see `Normals`) alone.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_shape(partial, shape)
    total = 1 + -(-shape.layers // _LAYERS_PER_SHARD)
    index: dict[str, str] = {}
    for number, shard in enumerate(_shards(shape, Normals(seed, pooled=pooled)), start=1):
        name = f"model-{number:05d}-of-{total:05d}.safetensors"
        save_file(shard, partial / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        if progress:
            progress(number, total)
    (partial / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    )
    partial.rename(folder)


def write_shape(folder: Path, shape: Shape) -> None:
    """Write config and tokenizer alone into a folder that is made."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    write_tokenizer(folder, shape.vocabulary)


def _shards(shape: Shape, rng: Normals) -> Iterator[Weights]:
    for first in range(0, shape.layers, _LAYERS_PER_SHARD):
        shard: Weights = {}
        for layer in range(first, min(first + _LAYERS_PER_SHARD, shape.layers)):
            shard.update(_layer(shape, layer, rng))
        yield shard
    yield {
        # Small beside the layers' outputs: a model that sees only its last token repeats it.
        "model.embed_tokens.weight": _matrix(rng, shape.vocabulary, shape.hidden, width=0.16),
        "model.norm.weight": _gain(rng, shape.hidden),
    }


def _layer(shape: Shape, layer: int, rng: Normals) -> Weights:
    hidden, middle = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "input_layernorm": _gain(rng, hidden),
        "post_attention_layernorm": _gain(rng, hidden),
        "self_attn.q_norm": _gain(rng, shape.head_dim),
        "self_attn.k_norm": _gain(rng, shape.head_dim),
        "self_attn.q_proj": _matrix(rng, queries, hidden),
        "self_attn.k_proj": _matrix(rng, keys, hidden),
        "self_attn.v_proj": _matrix(rng, keys, hidden),
        "self_attn.o_proj": _matrix(rng, hidden, queries),
        "mlp.gate_proj": _matrix(rng, middle, hidden),
        "mlp.up_proj": _matrix(rng, middle, hidden),
        "mlp.down_proj": _matrix(rng, hidden, middle),
    }
    return {f"model.layers.{layer}.{name}.weight": value for name, value in weights.items()}


def _matrix(rng: Normals, rows: int, columns: int, width: float = 0.64) -> NDArray[Any]:
    # 0.64 is as wide as the usual 0.02 is at 1024 columns, and every shape behaves alike.
    return rng.draw(rows, columns, width=width / columns**0.5)


def _gain(rng: Normals, size: int) -> NDArray[Any]:
    return rng.draw(size, width=0.1, middle=1.0)


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 40_960,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and a chat template of `vocabulary` ids.

    Ids 0..255 are the bytes, three special tokens follow, the rest are words that no text
    encodes to. `vocabulary` is at least 259.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"word{index}" for index in range(vocabulary - len(alphabet) - len(SPECIAL))]
    tokens = [*alphabet, *SPECIAL, *words]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "eos_token": SPECIAL[2],
                "pad_token": SPECIAL[0],
                "chat_template": _TEMPLATE,
                "model_max_length": 40_960,
            },
            indent=1,
        )
    )
