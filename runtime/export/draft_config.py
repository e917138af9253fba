"""The config.json of an EAGLE-3 draft, in the spellings that are published."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.errors import HearthError
from runtime.export.config_fields import refuse_unserved
from runtime.export.json_file import CONFIG_FILE, Fields, read_config
from runtime.export.model_config import ModelConfig, read_sizes

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
# The last six tell others of the base and its images.
_READ = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "num_target_layers",
    "target_hidden_size",
    "target_layer_ids",
    "target_model_type",
    "modal_type",
    "image_token_id",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
)
_USES_TAPS = "use_aux_hidden_state"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an EAGLE-3 draft.

    `model` has its one layer, `vocab_size` tokens are the draft's own, and `taps` are the layers
    of the base model whose inputs it reads, None where its configuration does not say.
    """

    model: ModelConfig
    vocab_size: int
    taps: tuple[int, ...] | None


def load_draft_config(folder: Path, base: ModelConfig) -> DraftConfig:
    """Read the configuration of a draft for `base`.

    Raises `model_invalid` or `model_unsupported` naming the field of the draft's config.json that
    is malformed, does not fit the base model or is not served.
    """
    fields = Fields(read_config(folder), f"the draft's {CONFIG_FILE}")
    _check_architecture(fields)
    refuse_unserved(fields, _READ)
    mrope = None if base.images is None else base.images.mrope
    model = read_sizes(fields, "llama", base.eos_token_ids, mrope)
    vocabulary = fields.size("draft_vocab_size", model.vocab_size)
    if vocabulary != model.vocab_size:
        # Some say that it is tied, as their base's is: it cannot be.
        model = msgspec.structs.replace(model, tied_head=False)
    _check_sizes(fields, model, base)
    if vocabulary > base.vocab_size:
        raise _misfit("draft_vocab_size", vocabulary, base.vocab_size)
    model = msgspec.structs.replace(model, bos_token_id=base.bos_token_id)
    return DraftConfig(model=model, vocab_size=vocabulary, taps=read_taps(fields))


def read_taps(fields: Fields) -> tuple[int, ...] | None:
    """The layers of the base whose inputs the draft reads; None where nothing names them.

    Three spellings are published. `eagle_aux_hidden_state_layer_ids` at the top level, as vLLM
    reads it, names layers by their inputs. The same field inside `eagle_config`, as SGLang and
    SpecForge have it, and `target_layer_ids` name layers by their outputs: the input of the next.
    """
    inside = fields.table("eagle_config") or Fields({}, "eagle_config")
    _check_eagle_config(inside)
    for place, name, shift in (
        (fields, "target_layer_ids", 1),
        (inside, _LAYER_IDS, 1),
        (fields, _LAYER_IDS, 0),
    ):
        if place.data.get(name) is not None:
            return tuple(layer + shift for layer in _layer_ids(place, name))
    return None


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers that published drafts of a base with so many layers read, by their inputs."""
    return (2, layers // 2, layers - 3)


def resolve_taps(asked: Sequence[int], draft: DraftConfig, base: ModelConfig) -> tuple[int, ...]:
    """The taps that are asked for, else the draft's own, else the published ones.

    Raises `invalid_value` unless they are distinct and each is 0 to the number of layers.
    """
    taps = tuple(asked) or draft.taps or default_taps(base.num_layers)
    if len(set(taps)) != len(taps) or not all(0 <= tap <= base.num_layers for tap in taps):
        raise HearthError(
            "invalid_value",
            f"the draft reads the inputs of layers {', '.join(map(str, taps))}: they must be "
            f"distinct and from 0 to {base.num_layers}",
            "eagle_layers",
        )
    return taps


def _check_architecture(fields: Fields) -> None:
    classes = fields.data.get("architectures") or [ARCHITECTURES[0]]
    if not isinstance(classes, list) or not set(ARCHITECTURES) & set(map(str, classes)):
        raise HearthError(
            "model_unsupported",
            f"a draft must be one of {', '.join(ARCHITECTURES)}",
            "architectures",
        )


def _check_sizes(fields: Fields, draft: ModelConfig, base: ModelConfig) -> None:
    if draft.num_layers != 1:
        raise HearthError(
            "model_unsupported",
            f"the draft has {draft.num_layers} layers: only drafts of one layer are served",
            "num_hidden_layers",
        )
    if draft.tied_head:
        raise HearthError(
            "model_unsupported", "a draft must have a head of its own", "tie_word_embeddings"
        )
    for name in ("hidden_size", "vocab_size"):
        if getattr(draft, name) != getattr(base, name):
            raise _misfit(name, getattr(draft, name), getattr(base, name))
    hidden = fields.size("target_hidden_size", base.hidden_size)
    if hidden != base.hidden_size:
        raise _misfit("target_hidden_size", hidden, base.hidden_size)
    layers = fields.size("num_target_layers", base.num_layers)
    if layers != base.num_layers:
        raise _misfit("num_target_layers", layers, base.num_layers)


def _misfit(name: str, own: int, base: int) -> HearthError:
    return HearthError(
        "model_invalid", f"{name} of the draft is {own}, the base model has {base}", name
    )


def _check_eagle_config(inside: Fields) -> None:
    if not inside.flag(_USES_TAPS, default=True):
        raise HearthError(
            "model_unsupported",
            "the draft reads the last hidden states alone: it is of an older EAGLE",
            _USES_TAPS,
        )


def _layer_ids(place: Fields, name: str) -> list[int]:
    ids = place.data[name]
    if not isinstance(ids, list) or not all(type(one) is int for one in ids) or not ids:
        raise HearthError("model_invalid", f"{name} must be a list of layers", name)
    return ids
