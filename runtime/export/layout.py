"""The tensors that a checkpoint of each architecture must hold, and their shapes."""

import re
from collections.abc import Iterator

import msgspec
import numpy as np

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.image_families import is_vision_tensor
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.export.weights import row_slices

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Older checkpoints carry the rotary frequencies, which follow from config.json.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def expected_tensors(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the export reads, one by one."""
    yield EMBEDDING, (model.vocab_size, model.hidden_size)
    if not model.tied_head:
        yield HEAD, (model.vocab_size, model.hidden_size)
    yield "model.norm.weight", (model.hidden_size,)
    for layer in range(model.num_layers):
        for name, shape in _layer_tensors(model).items():
            yield f"model.layers.{layer}.{name}", shape


def settle_head(checkpoint: Checkpoint, model: ModelConfig) -> ModelConfig:
    """The model as its tensors say: a head that differs from the table is no tied one.

    So `transformers` takes it, whatever config.json says. Raises `model_invalid` naming a tensor.
    """
    if not model.tied_head or HEAD not in checkpoint.names:
        return model
    shape = (model.vocab_size, model.hidden_size)
    for name in (EMBEDDING, HEAD):
        checkpoint.check(name, shape)
    for rows in row_slices(shape):
        table, head = (checkpoint.matrix(name, rows, slice(None)) for name in (EMBEDDING, HEAD))
        if not np.array_equal(table.astype(np.float32), head.astype(np.float32)):
            return msgspec.structs.replace(model, tied_head=False)
    return model


def check_tensors(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Raise `model_invalid` or `model_unsupported` naming the first tensor that does not fit."""
    # A tied head may have been stored all the same, as a copy (`settle_head`).
    head = HEAD if model.tied_head else None
    images = model.images is not None
    checkpoint.check_all(
        expected_tensors(model),
        lambda name: (
            name == head or _DERIVED.fullmatch(name) or (images and is_vision_tensor(name))
        ),
        f"a {model.architecture} model",
    )


def _layer_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.query_size, model.kv_size
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if model.attention_bias:
        sizes = {"q": q, "k": kv, "v": kv}
        tensors |= {f"self_attn.{kind}_proj.bias": (size,) for kind, size in sizes.items()}
    if model.output_bias:
        tensors["self_attn.o_proj.bias"] = (hidden,)
    if model.mlp_bias:
        sizes = {"gate": inner, "up": inner, "down": hidden}
        tensors |= {f"mlp.{kind}_proj.bias": (size,) for kind, size in sizes.items()}
    if model.qk_norm:
        tensors |= {f"self_attn.{kind}_norm.weight": (model.head_dim,) for kind in "qk"}
    return tensors
