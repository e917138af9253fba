"""Options of the runtime for an engine folder."""

import re
from typing import Annotated, Literal

import msgspec

from hearth.runtime.config import MOST_TREE_NODES
from hearth.runtime.errors import HearthError
from hearth.runtime.setting import setting

FEWEST_TREE_NODES = 2
MOST_ACCEPTED = 32
"""Tokens of one round; the entries of a draft step's causal mask fit into one word."""

_TREE = re.compile(r"(\d{1,3})x(\d{1,3})/(\d{1,3})")


class EagleDraftingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The token tree of EAGLE drafting.

    `drafting_top_k` tokens are proposed after a node, over `drafting_step` levels; the
    `verify_tree_size` best nodes, the root included, are verified. Its text is `10x6/60`.
    """

    drafting_top_k: int = 10
    drafting_step: int = 6
    verify_tree_size: int = 60

    def __str__(self) -> str:
        return f"{self.drafting_top_k}x{self.drafting_step}/{self.verify_tree_size}"

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


def draft_tree(text: str) -> EagleDraftingConfig | None:
    """Read a tree such as `10x6/60`; "" is None.

    Raises ValueError for another text, and with the reason for sizes that no tree has.
    """
    if not text:
        return None
    sizes = _TREE.fullmatch(text)
    if sizes is None:
        raise ValueError
    top_k, step, nodes = map(int, sizes.groups())
    tree = EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    try:
        _check_drafting(tree)
    except HearthError as error:
        raise ValueError(error.message.removeprefix("drafting_")) from error
    return tree


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of speculation.

    `eagle` None takes trees that suit the device. `lookup_tokens` are proposed when the last
    `lookup_ngram` tokens, or fewer of them down to `lookup_shortest`, occurred before in the row.
    `adaptive` lets the runtime stop where its own measurement says that speculation loses.
    """

    method: Annotated[
        Literal["off", "auto", "lookup", "eagle"],
        setting(
            "How several tokens a step are tried; it changes the speed, and the text at near-ties "
            "alone. `auto` takes the engine folder's draft, else `lookup`, which goes on as the "
            "reply's own text did before. It pauses by itself where it loses time."
        ),
    ] = msgspec.field(default="off", name="speculation")
    eagle: Annotated[
        EagleDraftingConfig | None,
        setting(
            "Tree of the draft's tokens, as top-k x step / size: how many are proposed after each "
            "token, how far ahead, and how many nodes one step verifies, the newest token "
            "included; empty for what suits the device.",
            parse=draft_tree,
            form="empty, or three whole numbers such as 10x6/60",
        ),
    ] = msgspec.field(default=None, name="draft_tree")
    lookup_tokens: Annotated[
        int,
        setting(
            "Tokens that `lookup` proposes at most; 0 for what suits the engine.",
            ge=0,
            le=30,
            expert=True,
        ),
    ] = 0
    lookup_ngram: int = 3
    lookup_shortest: int = 2
    adaptive: bool = True


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of serving an engine folder.

    A simulated engine has the folder's vocabulary and limits. `verify` asks for the known
    answer in the daemon alone. `image_memory` are bytes that others take for pictures, where the
    model sees. The prefix cache takes `prefix_cache_bytes` of the device's memory, then on a GPU
    `prefix_host_bytes`, then `prefix_disk_bytes` in `prefix_folder`. The folders in the folder
    `adapters` are adapters, which are loaded by their names; without it there are none.
    """

    threads: Annotated[
        int, setting("Threads of the engine; 0 for all physical cores.", ge=0, le=1024)
    ] = 0
    spin: Annotated[
        bool,
        setting(
            "Let engine threads spin for as long as a step lasts while they wait: faster on an "
            "idle machine, far slower beside busy neighbours.",
            expert=True,
        ),
    ] = False
    verify: Annotated[
        bool,
        setting(
            "Check the digest of every file of the engine folder at start, and the engine's "
            "known answer."
        ),
    ] = True
    max_batch: Annotated[
        int,
        setting(
            "Rows that run together; 0 for as many as fit into memory, up to the engine's limit.",
            ge=0,
            le=1024,
        ),
    ] = 0
    capacity: Annotated[
        int,
        setting(
            "Tokens a row may hold, prompt and reply together, a few of which speculation takes; "
            "0 for as many as fit into memory, up to the engine's limit.",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    engine_kind: Annotated[
        Literal["auto", "kernels", "onnxruntime", "simulated", "tensorrt"],
        setting(
            "What runs the engine; `auto` is what the folder was exported for, `simulated` is "
            "for benches and fault tests only.",
            expert=True,
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        setting(
            "Where the engine runs; `auto` is the device it was exported for, of the shipped "
            "model the CPU. There is no fallback: what cannot run there is refused."
        ),
    ] = "auto"
    step_ms: Annotated[
        float,
        setting(
            "Milliseconds that a step of a simulated engine takes.", ge=0, le=60000, expert=True
        ),
    ] = 0.0
    prefill_us: Annotated[
        float,
        setting(
            "Microseconds that each token of a prefill, padding included, adds to a step of a "
            "simulated engine.",
            ge=0,
            le=1000000,
            expert=True,
        ),
    ] = 0.0
    weights: Annotated[
        str,
        setting(
            "File of external weights, from `hearth weights`, to serve in place of the engine "
            "folder's own; empty for these.",
            reloads=True,
            path=True,
        ),
    ] = ""
    adapters: Annotated[
        str,
        setting(
            "Folder of the adapters, which `hearth adapter` keeps; empty for "
            "$STATE_DIRECTORY/adapters, else $XDG_STATE_HOME/hearth/adapters, else "
            "~/.local/state/hearth/adapters.",
            path=True,
        ),
    ] = ""
    prefill_budget: Annotated[
        float,
        setting(
            "By how much a piece of another's prompt may take longer than a step of the replies "
            "that wait for it, in steps; a longer prompt is taken in pieces.",
            gt=0,
            le=1000,
            expert=True,
        ),
    ] = 1.0
    prefix_cache_bytes: Annotated[
        int,
        setting(
            "Bytes at most of the memory in which the engine works that keep the beginnings of "
            "prompts, so that what begins alike is computed once; 0 for none.",
            ge=0,
            le=1 << 40,
        ),
    ] = 0
    prefix_host_bytes: Annotated[
        int,
        setting(
            "Bytes at most of the host's memory, pinned, for what finds no room there; on a GPU "
            "alone.",
            ge=0,
            le=1 << 40,
        ),
    ] = 0
    prefix_disk_bytes: Annotated[
        int,
        setting(
            "Bytes of `prefix_folder` for what finds no room in memory, which is there after a "
            "restart as well; 0 for none. They hold what prompts said, readable by the daemon's "
            "user alone.",
            ge=0,
            le=1 << 44,
        ),
    ] = 0
    prefix_folder: Annotated[
        str,
        setting(
            "Folder for it; empty for $HEARTH_CACHE/prefix, else $XDG_CACHE_HOME/hearth/prefix, "
            "else ~/.cache/hearth/prefix.",
            path=True,
        ),
    ] = ""
    image_memory: int = 0
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
