"""How a draft engine grows what it proposes: a tree, all of it in every step, or a chain.

Either begins with the logits and hidden states of a step [batch, 1], grows all further levels,
and plants the best nodes of every row; the draft's cache keeps nothing of it.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from runtime.caches.hybrid_cache_manager import HybridCacheManager
from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device, ProposalBuffers, StepBuffers, TreeBuffers
from runtime.device.tree_arrays import NO_NODE
from runtime.options import EagleDraftingConfig
from runtime.steps.bindings import StepBindings
from runtime.steps.recordings import Execute, Recordings
from runtime.tensors.dims import PROFILE_GENERATION, InferenceDims
from runtime.tensors.profiles import generation_profile

_ID = np.dtype(np.int32)
_SCORE = np.dtype(np.float32)


class DraftSteps(NamedTuple):
    """What the steps of a proposal need: the engine's, and the buffers that they fill.

    `bindings` have zeros for the base's hidden states; `base` are the base's caches.
    """

    config: LLMEngineRunnerConfig
    drafting: EagleDraftingConfig
    device: Device
    bindings: StepBindings
    inputs: StepBuffers
    proposal: ProposalBuffers
    base: HybridCacheManager


class TreeGrowth:
    """EAGLE-2's trees (Li et al. 2024): every step runs the whole proposal behind the entries."""

    def __init__(self, steps: DraftSteps) -> None:
        self._steps = steps
        self._ops = steps.device.tree_ops
        self._recorded = Recordings(steps.config, steps.device, steps.bindings)

    def grow(self, rows: int, batch: int) -> None:
        """One step a level, padded to `batch` rows, of which the newest slots are read."""
        steps, drafting = self._steps, self._steps.drafting
        if drafting.drafting_step > 1:
            caches = steps.bindings.caches
            caches.reserve(max(caches.row_lengths[:rows]) + drafting.proposal_size)
            steps.bindings.prepare(*self._step(batch, caches.kv.bucket))
        self._recorded.run(partial(self._levels, batch), drafting.drafting_step - 1)

    def finish(self, trees: TreeBuffers, speculating: Sequence[bool], width: int) -> None:
        """The best entries of the score table."""
        self._ops.finish_proposal(self._steps.proposal, trees, speculating, width)

    def capture(self, batch: int, bucket: int) -> None:
        """Capture the step of a whole proposal, or all that it takes."""
        if self._steps.drafting.drafting_step > 1:
            self._feed(batch, 0)
            step = self._step(batch, bucket)
            self._recorded.capture(*step, partial(self._levels, batch))

    def close(self) -> None:
        """Free what was captured here."""
        self._recorded.close()

    def _levels(self, batch: int, execute: Execute) -> None:
        """The root's best tokens are the first slots; each level's come after the one before."""
        proposal, drafting = self._steps.proposal, self._steps.drafting
        top_k, last = drafting.drafting_top_k, drafting.drafting_step - 2
        self._ops.begin_proposal(proposal, batch, top_k)
        for level in range(last + 1):
            self._feed(batch, level)
            execute(self._steps.bindings.stream)
            self._ops.extend_proposal(proposal, batch, top_k, level, last=level == last)

    def _feed(self, batch: int, level: int) -> None:
        steps, top_k = self._steps, self._steps.drafting.drafting_top_k
        shape = (batch, (level + 1) * top_k, top_k)
        self._ops.feed_proposal(steps.inputs, steps.proposal, steps.base.lengths, shape)

    def _step(self, batch: int, bucket: int) -> tuple[int, InferenceDims]:
        drafting = self._steps.drafting
        size, top_k = drafting.proposal_size, drafting.drafting_top_k
        dims = InferenceDims.proposal(batch, size, top_k, bucket)
        return generation_profile(self._steps.config, batch), dims


class ChainGrowth:
    """One token a level: the draft decodes its own output, one token behind the other.

    A level is a proposal of one slot, and the next level's step reads its token and its hidden
    state. The cache is written behind the entries and its length put back in the end.
    """

    def __init__(self, steps: DraftSteps) -> None:
        self._steps = steps
        self._device = steps.device
        batch = steps.base.lengths.shape[0]
        # A tree of fewer nodes than the chain could have needs no more levels.
        self._levels = steps.drafting.tree_size - 1
        zeros = steps.device.zeros
        self._tokens = zeros("chain_tokens", (self._levels, batch, 1), _ID)
        self._positions = zeros("chain_positions", (batch,), steps.base.lengths.dtype)
        shared = steps.proposal._replace(
            parents=zeros("chain_parents", (batch, 1), _ID),
            entries=zeros("chain_entries", (batch, 1), _ID),
            table_ids=zeros("chain_table_ids", (batch, 2), _ID),
            table_parents=zeros("chain_table_parents", (batch, 2), _ID),
            table_scores=zeros("chain_table_scores", (batch, 2), _SCORE),
        )
        self._slots = [
            shared._replace(ids=self._tokens.part("chain_token", level * batch, (batch, 1)))
            for level in range(self._levels)
        ]
        self._recorded = Recordings(steps.config, steps.device, steps.bindings)
        self._planted: tuple[int, ...] = ()
        self._index = np.empty((1, 0), np.int32)

    def grow(self, rows: int, batch: int) -> None:
        """One step of one token a level, padded to `batch` rows."""
        caches, ops = self._steps.bindings.caches, self._device.ops
        caches.reserve(max(caches.row_lengths[:rows]) + self._levels)
        ops.set_lengths(self._positions, self._steps.base.row_lengths)
        self._steps.bindings.prepare(*self._step(batch, caches.kv.bucket))
        self._recorded.run(partial(self._run, rows, batch), self._levels - 1)
        ops.set_lengths(caches.lengths, caches.row_lengths)

    def finish(self, trees: TreeBuffers, speculating: Sequence[bool], width: int) -> None:
        """Every node follows the one before it."""
        rows, limit = len(speculating), self._tokens.shape[1]
        planted = (width, *speculating)
        if self._planted != planted:
            # Which rows take part changes seldom: between two rounds only the tokens are new.
            places = np.arange(-1, width - 1, dtype=np.int32) * limit
            index = places + np.arange(rows, dtype=np.int32)[:, None]
            index[:, 0] = -1
            # What a row without a tree runs at its places is masked, and may spoil it all the same.
            index[np.logical_not(speculating)] = -1
            self._index = index.reshape(1, -1)
            parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (rows, 1))
            parents[np.logical_not(speculating), 1:] = NO_NODE
            self._device.tree_ops.plant(trees, np.zeros((rows, width), np.int32), parents)
            self._planted = planted
        ids = trees.ids.part("chain", 0, (rows * width, 1))
        self._device.tree_ops.gather_rows(self._tokens, self._levels * limit, self._index, ids)

    def capture(self, batch: int, bucket: int) -> None:
        """Capture the step of one token, or all that a chain takes."""
        if self._levels > 1:
            self._feed(batch, 0)
            self._recorded.capture(*self._step(batch, bucket), partial(self._run, batch, batch))

    def close(self) -> None:
        """Free what was captured here."""
        self._recorded.close()

    def _run(self, rows: int, batch: int, execute: Execute) -> None:
        """The root's best token is the first of the chain, and each level's the next."""
        bindings, ops, tree_ops = self._steps.bindings, self._device.ops, self._device.tree_ops
        tree_ops.begin_proposal(self._slots[0], batch, 1)
        for level in range(1, self._levels):
            self._feed(batch, level - 1)
            execute(bindings.stream)
            bindings.keep(rows, 1)
            ops.advance(self._positions, batch)
            ops.advance(bindings.caches.lengths, batch)
            tree_ops.begin_proposal(self._slots[level], batch, 1)

    def _step(self, batch: int, bucket: int) -> tuple[int, InferenceDims]:
        return PROFILE_GENERATION, InferenceDims.decode(batch, bucket)

    def _feed(self, batch: int, level: int) -> None:
        inputs = self._steps.inputs
        shape = (batch, 1, 1)
        self._device.tree_ops.feed_proposal(inputs, self._slots[level], self._positions, shape)


def choose_growth(steps: DraftSteps) -> TreeGrowth | ChainGrowth:
    """A chain where one token follows another; a plan has the whole proposal alone."""
    single = steps.drafting.drafting_top_k == 1 and not steps.config.static_drafting
    return ChainGrowth(steps) if single else TreeGrowth(steps)
