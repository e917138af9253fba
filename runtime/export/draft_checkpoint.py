"""The tensors of an EAGLE-3 draft: their names, shapes, and the draft's own vocabulary."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import HearthError
from runtime.export.checkpoint import Checkpoint
from runtime.export.draft_config import DraftConfig

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
