"""Growth of proposals by a draft engine: a tree, all of it in every step, or a chain.

Either begins with the logits and hidden states of a step [batch, 1], grows all further levels by
the step that is prepared, and plants the best nodes of every row; the cache keeps nothing of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import (
    ChainBuffers,
    Device,
    ProposalBuffers,
    StepBuffers,
    TreeBuffers,
)
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.reference.token_trees import NO_NODE
from hearth.runtime.runner.bindings import Execute, StepBindings
from hearth.runtime.tensors.profiles import PROFILE_GENERATION, InferenceDims, generation_profile


class DraftSteps(NamedTuple):
    """Configuration, device and buffers of the steps of a proposal.

    `bindings` have zeros for the base's hidden states; their start index is the length of the
    draft's cache once the newest entries are in it. `base` are the base's caches.
    """

    config: LLMEngineRunnerConfig
    drafting: EagleDraftingConfig
    device: Device
    bindings: StepBindings
    inputs: StepBuffers
    proposal: ProposalBuffers
    trees: TreeBuffers
    base: HybridCacheManager


class TreeGrowth:
    """EAGLE-2's trees (Li et al. 2024): every step runs the whole proposal behind the entries."""

    def __init__(self, steps: DraftSteps) -> None:
        self._steps = steps
        self._ops = steps.device.tree_ops
        self.levels = steps.drafting.drafting_step - 1
        """Steps of a proposal."""
        self.slots = steps.drafting.proposal_size if self.levels else 0
        """Slots that they write behind the entries of a row."""

    def grow(self, _rows: int, batch: int, execute: Execute) -> None:
        """One step a level, padded to `batch` rows: the root's best tokens are the first slots.

        Each level's come after the one before; the newest slots are read.
        """
        steps, top_k = self._steps, self._steps.drafting.drafting_top_k
        self._ops.begin_proposal(steps.proposal, batch, top_k)
        for level in range(self.levels):
            self.feed(batch, level)
            execute(steps.bindings.stream)
            last = level == self.levels - 1
            self._ops.extend_proposal(steps.proposal, batch, top_k, level, last=last)

    def feed(self, batch: int, level: int = 0) -> None:
        """Fill the step of a level."""
        steps, top_k = self._steps, self._steps.drafting.drafting_top_k
        shape = (batch, (level + 1) * top_k, top_k)
        self._ops.feed_proposal(steps.inputs, steps.proposal, steps.base.lengths, shape)

    def finish(self, speculating: Sequence[bool], width: int) -> None:
        """The best entries of the score table as nodes."""
        steps = self._steps
        self._ops.finish_proposal(steps.proposal, steps.trees, speculating, width)

    def step(self, batch: int, bucket: int) -> tuple[int, InferenceDims]:
        """Profile and sizes of a step."""
        drafting = self._steps.drafting
        size, top_k = drafting.proposal_size, drafting.drafting_top_k
        dims = InferenceDims.proposal(batch, size, top_k, bucket)
        return generation_profile(self._steps.config, batch), dims


class ChainGrowth:
    """One token a level: the draft decodes its own output, one token behind the other.

    Each level's token becomes a node at once, and the next step reads it and its hidden state. The
    cache is written behind the entries.
    """

    def __init__(self, steps: DraftSteps) -> None:
        self._steps = steps
        # A tree of fewer nodes than the chain could have needs no more levels.
        self._nodes = steps.drafting.tree_size
        self.levels = self.slots = self._nodes - 2
        self._chain = ChainBuffers(
            steps.inputs,
            steps.proposal.logits,
            steps.proposal.hidden_states,
            steps.proposal.hidden_states_from_draft.part(
                "hidden_states_from_draft", 0, steps.proposal.hidden_states.shape
            ),
            steps.proposal.full_ids,
            steps.trees,
            steps.base.lengths,
        )
        self._planted: tuple[bool, ...] = ()

    def grow(self, rows: int, batch: int, execute: Execute) -> None:
        """One step of one token a level, padded to `batch` rows."""
        bindings = self._steps.bindings
        self.feed(batch)
        for level in range(1, self._nodes - 1):
            execute(bindings.stream)
            bindings.keep(rows, 1)
            self.feed(batch, level)

    def feed(self, batch: int, level: int = 0) -> None:
        """Take the best tokens as nodes, and fill the step of the next level."""
        self._steps.device.tree_ops.draft_chain(self._chain, batch, self._nodes, level)

    def finish(self, speculating: Sequence[bool], width: int) -> None:
        """Every node follows the one before it."""
        planted = tuple(speculating)
        if self._planted == planted:
            # Which rows take part changes seldom: between two rounds only the tokens are new.
            return
        parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(planted), 1))
        parents[np.logical_not(speculating), 1:] = NO_NODE
        target = self._steps.trees.parents.part("chain_parents", 0, parents.shape)
        self._steps.device.put(target, parents)
        self._planted = planted

    def step(self, batch: int, bucket: int) -> tuple[int, InferenceDims]:
        """Profile and sizes of a step."""
        return PROFILE_GENERATION, InferenceDims.decode(batch, bucket)


def grows_chains(config: LLMEngineRunnerConfig, drafting: EagleDraftingConfig) -> bool:
    """Return True if proposals grow as chains; a plan has only whole proposals."""
    return drafting.drafting_top_k == 1 and not config.static_drafting


def choose_growth(steps: DraftSteps) -> TreeGrowth | ChainGrowth:
    """Choose the growth of an engine's proposals."""
    return (ChainGrowth if grows_chains(steps.config, steps.drafting) else TreeGrowth)(steps)
