"""What the export of a draft engine is asked for."""

from pathlib import Path
from typing import Literal

import msgspec

from runtime.config import MOST_TREE_NODES
from runtime.errors import HearthError
from runtime.options import FEWEST_TREE_NODES, MOST_ACCEPTED, EagleDraftingConfig

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
