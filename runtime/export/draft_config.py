"""The config.json of an EAGLE-3 draft, in the spellings that are published."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import MOST_TREE_NODES
from hearth.runtime.errors import HearthError
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.json_file import CONFIG_FILE, Fields, read_config, refuse_unserved
from hearth.runtime.export.model_config import ModelConfig, read_sizes
from hearth.runtime.options import FEWEST_TREE_NODES, MOST_ACCEPTED, EagleDraftingConfig

DEFAULT_TREE = 60
"""Nodes of a verified tree, and slots of a proposal tree: those of the default drafting."""
_VERIFIED = ("auto", "trees", "chains")


class DraftOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An EAGLE-3 draft, in the folder that it is published as, and the largest trees of a step.

    `eagle_layers` are those of the base whose inputs the draft reads, the number of layers
    standing for the output of the last; empty takes what the draft's configuration names.
    `max_verify_tree_size` and `max_draft_tree_size` 0 take 60, or the capacity where that is less.
    A TensorRT plan runs proposals of one shape alone: `drafting_top_k` tokens after a node over
    `drafting_step` levels, 0 for 10 and 6. `verify` "chains" makes engines without a tree mask,
    for one token after each node.
    """

    folder: Path
    eagle_layers: tuple[int, ...] = ()
    max_verify_tree_size: int = 0
    max_draft_tree_size: int = 0
    drafting_top_k: int = 0
    drafting_step: int = 0
    verify: Literal["auto", "trees", "chains"] = "auto"


def check_draft_options(options: DraftOptions, *, static: bool) -> None:
    """Raise `invalid_value` or `unsupported_option` naming the first option that has no meaning.

    `static` says that a plan is built.
    """
    if options.verify not in _VERIFIED:
        allowed = ", ".join(_VERIFIED)
        raise HearthError("invalid_value", f"verify must be one of {allowed}", "verify")
    if options.verify == "chains" and static:
        raise HearthError("unsupported_option", "TensorRT plans verify trees", "verify")
    size = options.max_verify_tree_size
    if size and not FEWEST_TREE_NODES <= size <= MOST_TREE_NODES:
        raise HearthError(
            "invalid_value",
            f"max_verify_tree_size must be {FEWEST_TREE_NODES} to {MOST_TREE_NODES}",
            "max_verify_tree_size",
        )
    for name in ("max_draft_tree_size", "drafting_top_k", "drafting_step"):
        if getattr(options, name) < 0:
            raise HearthError("invalid_value", f"{name} must not be negative", name)
        if getattr(options, name) and static == (name == "max_draft_tree_size"):
            raise HearthError("unsupported_option", _shaped_elsewhere(name), name)
    if options.drafting_step >= MOST_ACCEPTED - 1:
        raise HearthError(
            "invalid_value", f"drafting_step must be below {MOST_ACCEPTED - 1}", "drafting_step"
        )


def _shaped_elsewhere(name: str) -> str:
    if name == "max_draft_tree_size":
        return "a TensorRT plan's draft tree has drafting_top_k times drafting_step slots"
    return (
        "only a TensorRT plan fixes its draft's tree when it is exported: choose it where the "
        f"engine is served, with {name}"
    )


def resolve_drafting(options: DraftOptions) -> tuple[int, int]:
    """Tokens after a node, and levels, of a plan's proposals."""
    default = EagleDraftingConfig()
    return (
        options.drafting_top_k or default.drafting_top_k,
        options.drafting_step or default.drafting_step,
    )


def resolve_tree(name: str, asked: int, capacity: int) -> int:
    """A largest tree of a step; raises `invalid_value` where no row could hold it."""
    if asked > capacity:
        raise HearthError("invalid_value", f"{name} must be at most the capacity, {capacity}", name)
    return asked or min(DEFAULT_TREE, capacity)


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


FUSION = "fc"
"""The projection of the base's hidden states."""
LAYER = "midlayer"
EMBEDDED_NORM = f"{LAYER}.input_layernorm"
FUSED_NORM = f"{LAYER}.hidden_norm"
OFFSETS, MEMBERS = "d2t", "t2d"
# The base's table serves; the rotary frequencies follow from config.json.
_NOT_READ = re.compile(r"embed_tokens\.weight|t2d|(.*\.)?rotary_emb\.inv_freq")


def open_draft(folder: Path) -> Checkpoint:
    """A draft's tensors by their shortest published names: `fc.weight`, `midlayer.mlp...`."""
    return Checkpoint(folder, _shortest)


def _shortest(name: str) -> str:
    return re.sub(r"^layers\.0\.", f"{LAYER}.", name.removeprefix("model."))


def check_draft_tensors(checkpoint: Checkpoint, draft: DraftConfig, base_hidden_dim: int) -> None:
    """Raise `model_invalid` or `model_unsupported` naming the first tensor that does not fit."""
    checkpoint.check_all(
        _expected_tensors(draft, base_hidden_dim),
        lambda name: name == OFFSETS or _NOT_READ.fullmatch(name),
        "an EAGLE-3 draft",
    )


def read_full_ids(checkpoint: Checkpoint, draft: DraftConfig) -> NDArray[np.int32] | None:
    """The base's id of each draft id [draft vocabulary]; None where the two are the same.

    `d2t` holds these ids, or what is to be added to the draft's id: whichever gives distinct ids
    of the base, and those that `t2d` marks where it is there. Both can be right only of a
    vocabulary in which no two ids are neighbours; then they are ids. Raises `model_invalid`.
    """
    if OFFSETS not in checkpoint.names:
        if draft.vocab_size != draft.model.vocab_size:
            raise HearthError(
                "model_invalid", f"the draft has its own vocabulary and lacks {OFFSETS}", OFFSETS
            )
        return None
    stored = _integers(checkpoint, draft.vocab_size)
    own = np.arange(draft.vocab_size)
    for ids in (stored, stored + own):
        if _is_vocabulary(ids, draft.model.vocab_size) and _are_marked(checkpoint, ids, draft):
            same = draft.vocab_size == draft.model.vocab_size and np.array_equal(ids, own)
            return None if same else ids.astype(np.int32)
    raise HearthError(
        "model_invalid", f"{OFFSETS} gives no distinct tokens of the base model", OFFSETS
    )


def _integers(checkpoint: Checkpoint, size: int) -> NDArray[np.int64]:
    values = checkpoint.vector(OFFSETS)
    if values.dtype.kind != "i" or values.shape != (size,):
        raise HearthError(
            "model_invalid", f"{OFFSETS} must be {size} whole numbers, one a draft id", OFFSETS
        )
    return values.astype(np.int64)


def _is_vocabulary(ids: NDArray[np.int64], size: int) -> bool:
    inside = ids.min() >= 0 and ids.max() < size
    return bool(inside) and len(np.unique(ids)) == len(ids)


def _are_marked(checkpoint: Checkpoint, ids: NDArray[np.int64], draft: DraftConfig) -> bool:
    if MEMBERS not in checkpoint.names:
        return True
    marks = checkpoint.vector(MEMBERS)
    if marks.shape != (draft.model.vocab_size,):
        raise HearthError(
            "model_invalid", f"{MEMBERS} must mark each token of the base model", MEMBERS
        )
    return np.array_equal(np.flatnonzero(marks), np.sort(ids))


def _expected_tensors(
    draft: DraftConfig, base_hidden_dim: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    model = draft.model
    hidden, inner = model.hidden_size, model.intermediate_size
    query, kv = model.query_size, model.kv_size
    yield f"{FUSION}.weight", (hidden, base_hidden_dim)
    for name in (EMBEDDED_NORM, FUSED_NORM, f"{LAYER}.post_attention_layernorm", "norm"):
        yield f"{name}.weight", (hidden,)
    for name, rows in (("q", query), ("k", kv), ("v", kv)):
        yield f"{LAYER}.self_attn.{name}_proj.weight", (rows, 2 * hidden)
    yield f"{LAYER}.self_attn.o_proj.weight", (hidden, query)
    for name in ("gate", "up"):
        yield f"{LAYER}.mlp.{name}_proj.weight", (inner, hidden)
    yield f"{LAYER}.mlp.down_proj.weight", (hidden, inner)
    yield "lm_head.weight", (draft.vocab_size, hidden)
