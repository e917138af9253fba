"""Values that the fields of a model's config.json may have."""

from collections.abc import Collection
from typing import Any

from hearth.runtime.errors import HearthError
from hearth.runtime.export.json_file import Fields

# Nothing that is exported depends on them.
_HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "model_type",
        "name_or_path",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "temperature",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_READ = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)
# They change what a model computes, but not with these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "pretraining_tp": (1,)}


def refuse_unserved(fields: Fields, also_read: Collection[str] = ()) -> None:
    """Raise `model_unsupported` naming the first field that may change what the model computes.

    A field that is neither read, nor `also_read`, nor known to be harmless must be null, false,
    zero or empty.
    """
    for name, value in fields.data.items():
        known = name in _HARMLESS or name in _READ or name in also_read or name.startswith("_")
        if not known and (value not in _NEUTRAL[name] if name in _NEUTRAL else value):
            raise HearthError(
                "model_unsupported", f"config.json sets {name}, which is not served", name
            )
