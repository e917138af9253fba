"""What the caller of the runtime may ask of an engine folder."""

from typing import Literal

import msgspec

from runtime.config import MOST_TREE_NODES
from runtime.errors import HearthError

FEWEST_TREE_NODES = 2
MOST_ACCEPTED = 32
"""Tokens of one round; the entries of a draft step's causal mask fit into one word."""


class EagleDraftingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The token tree of EAGLE drafting.

    `drafting_top_k` tokens are proposed after a node, over `drafting_step` levels; the
    `verify_tree_size` best nodes, the root included, are verified.
    """

    drafting_top_k: int = 10
    drafting_step: int = 6
    verify_tree_size: int = 60

    @property
    def proposal_size(self) -> int:
        """Slots of the proposal tree."""
        return self.drafting_top_k * self.drafting_step

    @property
    def table_size(self) -> int:
        """Entries of the score table: the root, K, and K * K for each further level."""
        k = self.drafting_top_k
        return 1 + k + (self.drafting_step - 1) * k * k

    @property
    def tree_size(self) -> int:
        """Nodes that are verified: no more than were ever scored."""
        return min(self.verify_tree_size, self.table_size)

    @property
    def most_accepted(self) -> int:
        """Tokens that one round can give."""
        return self.drafting_step + 1

    @property
    def room(self) -> int:
        """Free cache slots that a round needs in a row, of base and draft."""
        return max(self.tree_size, self.proposal_size, self.most_accepted)


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the runtime speculates.

    "auto" takes the engine folder's draft if there is one, else `lookup`. `eagle` None takes trees
    that suit the device. `lookup_tokens`, 0 for what suits the engine, are proposed when the last
    `lookup_ngram` tokens, or fewer of them down to `lookup_shortest`, occurred before in the row.
    `adaptive` lets the runtime stop where its own measurement says that speculation loses.
    """

    method: Literal["off", "auto", "lookup", "eagle"] = "off"
    eagle: EagleDraftingConfig | None = None
    lookup_tokens: int = 0
    lookup_ngram: int = 3
    lookup_shortest: int = 2
    adaptive: bool = True


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine folder is served; 0 means all physical cores, or the most that fits.

    `engine_kind` "simulated" puts a simulated engine with steps of `step_ms` milliseconds behind
    the folder's vocabulary and limits; a prefill step takes `prefill_us` microseconds more for each
    token that it computes, padding included. `device` "" is the one that the folder was exported
    for. `verify` checks the digest of every file, and in the daemon the known answer. What a chunk
    of prompt adds to the wait of rows that decode is at most `prefill_budget` decode steps.
    `speculation` says how several tokens a step are tried; it changes the speed, and the text at
    near-ties alone. `image_memory` are bytes that others take for pictures, where the model sees.
    The prefix cache takes `prefix_cache_bytes` of the device's memory, 0 for no such cache, then on
    a GPU `prefix_host_bytes` of pinned host memory, then `prefix_disk_bytes` in `prefix_folder`.
    `weights` is a file of external weights in place of the engine folder's own. The folders in the
    folder `adapters` are adapters, which are loaded by their names.
    """

    threads: int = 0
    spin: bool = False
    max_batch: int = 0
    capacity: int = 0
    verify: bool = True
    engine_kind: Literal["", "kernels", "onnxruntime", "tensorrt", "simulated"] = ""
    device: Literal["", "cpu", "cuda"] = ""
    step_ms: float = 0.0
    prefill_us: float = 0.0
    prefill_budget: float = 1.0
    image_memory: int = 0
    prefix_cache_bytes: int = 0
    prefix_host_bytes: int = 0
    prefix_disk_bytes: int = 0
    prefix_folder: str = ""
    weights: str = ""
    adapters: str = ""
    speculation: SpeculationOptions = SpeculationOptions()


def check_speculation(options: SpeculationOptions) -> None:
    """Raise `invalid_value` naming the first option that has no meaning."""
    if options.eagle is not None:
        _check_drafting(options.eagle)
    if not 0 <= options.lookup_tokens < MOST_ACCEPTED - 1:
        raise HearthError(
            "invalid_value", f"lookup_tokens must be 0 to {MOST_ACCEPTED - 2}", "lookup_tokens"
        )
    if not 1 <= options.lookup_shortest <= options.lookup_ngram:
        raise HearthError(
            "invalid_value",
            f"lookup_shortest must be 1 to lookup_ngram, {options.lookup_ngram}",
            "lookup_shortest",
        )


def _check_drafting(eagle: EagleDraftingConfig) -> None:
    for name in ("drafting_top_k", "drafting_step"):
        if getattr(eagle, name) < 1:
            raise HearthError("invalid_value", f"{name} must be at least 1", name)
    if eagle.most_accepted >= MOST_ACCEPTED:
        raise HearthError(
            "invalid_value", f"drafting_step must be below {MOST_ACCEPTED - 1}", "drafting_step"
        )
    if not FEWEST_TREE_NODES <= eagle.verify_tree_size <= MOST_TREE_NODES:
        raise HearthError(
            "invalid_value",
            f"a tree has {FEWEST_TREE_NODES} to {MOST_TREE_NODES} nodes",
            "verify_tree_size",
        )
