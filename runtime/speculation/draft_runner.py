"""Steps of an EAGLE-3 draft engine, and growth of its proposals: a tree in every step, or a chain.

Growth begins with the logits and hidden states of a step [batch, 1], grows all further levels by
the step that is prepared, and plants the best nodes of every row; the cache keeps nothing of it.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import (
    ChainBuffers,
    Device,
    PathShape,
    PendingPaths,
    ProposalBuffers,
    StepBuffers,
    TreeBuffers,
)
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.images import EmbeddingStore
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.options import EagleDraftingConfig
from hearth.runtime.reference.token_trees import NO_NODE
from hearth.runtime.runner.bindings import CapturedSteps, Execute, StepBindings
from hearth.runtime.runner.image_merge import ImageMerge, ImagePiece
from hearth.runtime.runner.pipeline_io import DraftIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.tensors.profiles import (
    PROFILE_CONTEXT,
    PROFILE_GENERATION,
    InferenceDims,
    generation_profile,
    prefill_width,
)
from hearth.runtime.tensors.tensor import Tensor


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
        """Cache slots that the steps write behind the entries of a row."""

    def grow(self, _rows: int, batch: int, execute: Execute) -> None:
        """Run a step for each level, padded to `batch` rows, from the root's best tokens on.

        The slots of each level follow those of the level before; a step reads the newest ones.
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
        """Make the best entries of the score table the nodes."""
        steps = self._steps
        self._ops.finish_proposal(steps.proposal, steps.trees, speculating, width)

    def step(self, batch: int, bucket: int) -> tuple[int, InferenceDims]:
        """Profile and sizes of a step."""
        drafting = self._steps.drafting
        size, top_k = drafting.proposal_size, drafting.drafting_top_k
        dims = InferenceDims.proposal(batch, size, top_k, bucket)
        return generation_profile(self._steps.config, batch), dims


class ChainGrowth:
    """Growth of one token a level: the draft decodes its own output, token by token.

    The token of a level becomes a node at once, and the next step reads it and its hidden state.
    Steps write into the cache behind the entries.
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
        """Run a step of one token for each level, padded to `batch` rows."""
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
        """Make each node the child of the node before it."""
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


_CACHES = 1


class DraftEntries(NamedTuple):
    """New entries of the draft's cache, of rows that lie together, padded at the right.

    `token_ids` [rows, S]; `lengths` and `first` positions, one a row; `hidden` [rows, S] says
    where each entry's hidden state lies in the base's `hidden_states`, -1 for padding. `images`
    are the image pieces that replace tokens of a prompt.
    """

    token_ids: NDArray[np.int64]
    lengths: list[int]
    first: list[int]
    hidden: NDArray[np.int32]
    images: Sequence[ImagePiece] = ()


class NewestEntries(NamedTuple):
    """Newest entries of a round, as lists: `token_ids` and `hidden` have S numbers a row."""

    token_ids: list[list[int]]
    lengths: list[int]
    first: list[int]
    hidden: list[list[int]]


class EagleDraftRunner:
    """Runs the steps of an EAGLE-3 draft engine and proposes token trees with it.

    Source: EAGLE-3, Li et al. 2025; trees as in EAGLE-2, Li et al. 2024.
    """

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        drafting: EagleDraftingConfig,
        executor: EngineExecutor,
        resources: SharedResources,
        device: Device,
        *,
        trees: TreeBuffers,
        embeddings: EmbeddingStore | None = None,
    ) -> None:
        self.executor = executor
        """For counters and introspection."""
        self._config = config
        self._drafting = drafting
        self._ops = device.ops
        self._tree_ops = device.tree_ops
        io = DraftIO.create_for_spec_decode_draft(config, drafting, resources, device)
        self._inputs, self._hidden = io.entries.inputs, io.hidden_states_input
        self._grown = io.growing.inputs.lengths
        self._prompt = io.prompt
        self._images: ImageMerge | None = None
        if embeddings is not None:
            self._images = ImageMerge(embeddings, device, self._prompt.inputs.inputs_embeds, ())
        self._steps, self._growing = (
            StepBindings(
                config, executor, step, resources, device, prompt=prompt, cache_index=_CACHES
            )
            for step, prompt in ((io.entries, io.prompt), (io.growing, None))
        )
        self.caches = self._steps.caches
        self._captured = CapturedSteps(config, device, self._steps)
        self._base_lengths = resources.cache_managers[0].lengths
        self._growth = choose_growth(
            DraftSteps(
                config=config,
                drafting=drafting,
                device=device,
                bindings=self._growing,
                inputs=io.growing.inputs,
                proposal=io.proposal,
                trees=trees,
                base=resources.cache_managers[0],
            )
        )
        # On the CPU a step costs by its tokens; on a GPU every width would need a graph.
        self._accept_width = drafting.most_accepted if config.device == "cuda" else 0

    def execute_prefill_step(self, entries: DraftEntries, source: Tensor, first: int = 0) -> None:
        """Append entries of a prompt chunk of the rows from place `first` on; nothing is proposed.

        `source` are the base's hidden states. A row may have no entry in the step.
        """
        rows, width = entries.token_ids.shape
        self._steps.begin_prompt(first, rows, width)
        self._fill(self._prompt.inputs, entries, source)
        if self._images is not None:
            self._images.merge(entries.images)
        dims = InferenceDims.prefill(rows, width, self.caches.kv.bucket)
        self._steps.prepare(PROFILE_CONTEXT, dims, first)
        self._steps.executor.execute(self._steps.stream)
        self._steps.keep(rows, width, first)
        self.caches.commit(entries.lengths, first)

    def prompt_width(self, entries: int, start: int) -> int:
        """The width of a prefill step of up to `entries` a row, for rows that begin by `start`."""
        room = self._config.max_kv_cache_capacity - start
        return prefill_width(self._config, entries, room)

    def save_hidden(
        self, source: Tensor, places: Sequence[int], target: Tensor, first: int
    ) -> None:
        """Copy hidden states at `places` of `source` to the places of `target` from `first` on.

        Both buffers are read flat: [1, all places, W].
        """
        rows, count, size = source.shape
        out = target.part("waiting_hidden_states", first * size, (len(places), size))
        self._tree_ops.gather_rows(source, rows * count, np.array([places], np.int32), out)

    def accept_shape(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and entries a row of the step that appends `width` entries to `rows` rows."""
        return self._steps.padded(rows), self._accept_width or width

    def propose(
        self, entries: NewestEntries, source: Tensor, speculating: Sequence[bool], width: int
    ) -> None:
        """Append the entries of the first rows' newest tokens, and plant a tree behind each row's.

        A row's tree has its best `width` nodes; node 0 alone if the row is not `speculating`. The
        cache keeps nothing but the entries. The entries are padded to an `accept_shape`; the ones
        of padding rows are dropped.
        """
        rows, caches = len(speculating), self.caches
        batch, each = len(entries.token_ids), len(entries.token_ids[0])
        held = caches.row_lengths[:rows]
        caches.reserve(max(held) + each + self._growth.slots)
        filled = [*held, *[0] * (batch - rows)]
        self._ops.put_entries(
            self._inputs,
            entries.token_ids,
            entries.lengths,
            entries.first,
            entries.hidden,
            filled=filled,
        )
        shape, bucket = (batch, each), caches.kv.bucket
        self._steps.prepare(*self._entering(shape, bucket))
        work = partial(self._round, source, rows, shape, bucket)
        self._captured.run(work, 1 + self._growth.levels)
        self.take_proposal(entries.lengths[:rows], speculating, width)

    def propose_ahead(self, rows: int, paths: PendingPaths, width: int) -> bool:
        """Queue the steps of `propose` for the first rows behind a round that is under way.

        The entries are the ones that the round's walks will find in trees of `width` nodes. The
        proposal counts only if `take_proposal` follows. False if nothing was queued.
        """
        caches = self.caches
        batch, each = self.accept_shape(rows, 0)
        bucket = caches.kv.bucket
        if not each or max(caches.row_lengths[:rows]) + each + self._growth.slots > bucket:
            return False
        self._steps.prepare(*self._entering((batch, each), bucket))
        if not self._captured.ready:
            return False
        shape = PathShape(rows, batch, each, width)
        self._ops.enter_paths(self._inputs, paths, self._base_lengths, shape)
        return self._captured.launch(1 + self._growth.levels)

    def take_proposal(self, counts: Sequence[int], speculating: Sequence[bool], width: int) -> None:
        """Keep `counts` entries of the first rows, and plant the trees grown behind them."""
        rows = len(counts)
        self.caches.count(counts)
        every = [*speculating, *[False] * (self._steps.padded(rows) - rows)]
        self._growth.finish(every, width)

    def capture_draft_proposal_graph(self, batch_sizes: Iterable[int], source: Tensor) -> None:
        """Capture the steps of a proposal for these batch sizes, between batches.

        The hidden states of its entries will be in `source`.
        """
        fixed = self._accept_width
        widths = [fixed] if fixed else range(1, self._drafting.most_accepted + 1)
        for batch, bucket in self._steps.reset_for_captures(batch_sizes):
            for width in widths:
                self._capture_entries(source, (batch, width), bucket)
            if self._growth.levels and not self._captured.takes_work:
                self._growth.feed(batch)
                self._growing.capture(*self._growth.step(batch, bucket))

    def _capture_entries(self, source: Tensor, shape: tuple[int, int], bucket: int) -> None:
        """Capture a step of entries; with it the rest of the round, if work can be captured."""
        batch, width = shape
        none, tokens = [0] * batch, [[0] * width for _ in range(batch)]
        self._ops.put_entries(self._inputs, tokens, [1] * batch, none, tokens, filled=none)
        self._ops.feed_entries(self._inputs, source, self._hidden, self._grown, shape)
        work = partial(self._round, source, batch, shape, bucket)
        self._captured.capture(*self._entering(shape, bucket), work)

    def _entering(self, shape: tuple[int, int], bucket: int) -> tuple[int, InferenceDims]:
        profile = generation_profile(self._config, shape[0], second=True)
        return profile, InferenceDims.accept(*shape, bucket)

    def _round(
        self, source: Tensor, rows: int, shape: tuple[int, int], bucket: int, execute: Execute
    ) -> None:
        """Run a step of the newest entries, and the steps that grow a proposal behind them."""
        batch, width = shape
        steps, growth = self._steps, self._growth
        steps.prepare(*self._entering(shape, bucket))
        self._ops.feed_entries(self._inputs, source, self._hidden, self._grown, shape)
        execute(steps.stream)
        steps.keep(rows, width)
        if growth.levels:
            self._growing.prepare(*growth.step(batch, bucket))
        growth.grow(rows, batch, execute)

    def close(self) -> None:
        """Free captured graphs and the engine."""
        with ExitStack() as closing:
            closing.callback(self.executor.close)
            closing.callback(self._captured.close)

    def _fill(self, inputs: StepBuffers, entries: DraftEntries, source: Tensor) -> None:
        # A row without an entry runs padding, which is not read and not kept.
        lengths = [max(1, length) for length in entries.lengths]
        self._ops.feed_prefill(inputs, entries.token_ids, lengths, entries.first)
        flat = entries.hidden.reshape(1, -1)
        rows, places, _ = source.shape
        self._tree_ops.gather_rows(source, rows * places, flat, self._hidden)
