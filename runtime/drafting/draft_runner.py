from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device, ProposalBuffers, StepBuffers, TreeBuffers
from runtime.drafting.options import EagleDraftingConfig
from runtime.errors import HearthError
from runtime.executor.engine_executor import EngineExecutor
from runtime.pipeline_io import PipelineIO
from runtime.shared_resources import SharedResources
from runtime.step_runner import StepRunner
from runtime.tensors.dims import PROFILE_CONTEXT, InferenceDims
from runtime.tensors.static_dims import accept_profile, proposal_profile
from runtime.tensors.tensor import Tensor

_CACHES = 1


class DraftEntries(NamedTuple):
    """New entries of the draft's cache: the first rows of the batch, padded at the right.

    `token_ids` [rows, S]; `lengths` and `first` positions, one a row; `hidden` [rows, S] says
    where each entry's hidden state lies in the base's `hidden_states`, -1 for padding.
    """

    token_ids: NDArray[np.int64]
    lengths: list[int]
    first: list[int]
    hidden: NDArray[np.int32]


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
    ) -> None:
        self._config = config
        self._drafting = drafting
        self._ops = device.ops
        self._tree_ops = device.tree_ops
        io = PipelineIO.create_for_spec_decode_draft(config, device, drafting, resources.full_ids)
        self._input, self._own, self._proposal = _hidden_buffers(io)
        self._steps = StepRunner(config, executor, io, resources, device, cache_index=_CACHES)
        self.caches = self._steps.caches
        self._lengths = resources.cache_managers[0].lengths
        self._buffers = StepBuffers(
            table=resources.embedding,
            next_tokens=io.next_tokens,
            embeds=io.inputs_embeds,
            positions=io.position_ids,
            select=io.select_token_indices,
            start=self.caches.lengths,
            mask=io.tree_mask,
        )
        # On the CPU a step costs by its tokens; on a GPU every width would need a graph.
        self._accept_width = drafting.most_accepted if config.device == "cuda" else 0

    @property
    def executor(self) -> EngineExecutor:
        """The executor, for counters and introspection."""
        return self._steps.executor

    def execute_prefill_step(self, entries: DraftEntries, source: Tensor) -> None:
        """Append entries of a prompt chunk; nothing is proposed from them.

        `source` are the base's hidden states. A row may have no entry in the step.
        """
        rows, width = entries.token_ids.shape
        self._fill(entries, source)
        dims = InferenceDims.prefill(rows, width, self.caches.kv.bucket)
        self._steps.run(PROFILE_CONTEXT, dims, rows)
        self.caches.commit(entries.lengths)

    def execute_accept_step(self, entries: DraftEntries, source: Tensor) -> None:
        """Append the entries of every row's newest tokens and begin a proposal from the last."""
        rows = len(entries.lengths)
        entries = self._padded(entries)
        batch, width = entries.token_ids.shape
        self._fill(entries, source)
        dims = InferenceDims.accept(batch, width, self.caches.kv.bucket)
        self._steps.run(accept_profile(self._config, batch), dims, rows)
        self.caches.commit(entries.lengths[:rows])
        self._tree_ops.begin_proposal(self._proposal, batch, self._drafting.drafting_top_k)

    def execute_proposal_steps(self) -> None:
        """Grow the proposal of every row to its full depth; the cache keeps nothing of it."""
        drafting = self._drafting
        if drafting.drafting_step == 1:
            return
        self.caches.reserve(max(self.caches.row_lengths) + drafting.proposal_size)
        batch = self._steps.padded(self.caches.batch)
        self._clear(self._input, batch, drafting.proposal_size)
        profile = proposal_profile(self._config, batch)
        last = drafting.drafting_step - 2
        for level in range(last + 1):
            dims = self._feed_proposal(batch, level)
            self._steps.run(profile, dims, self.caches.batch, keep=False)
            self._tree_ops.extend_proposal(
                self._proposal, batch, drafting.drafting_top_k, level, last=level == last
            )

    def finish(self, trees: TreeBuffers, speculating: Sequence[bool], width: int) -> None:
        """Plant the best `width` nodes of every row; node 0 alone where not speculating."""
        batch = self._steps.padded(len(speculating))
        every = [*speculating, *[False] * (batch - len(speculating))]
        self._tree_ops.finish_proposal(self._proposal, trees, every, width)

    def capture_draft_proposal_graph(self, batch_sizes: Iterable[int]) -> None:
        """Capture the draft step of a proposal for these batch sizes, between batches."""
        if self._drafting.drafting_step == 1:
            return
        self.caches.reset(0)
        for batch in self._sizes(batch_sizes):
            for bucket in self.caches.kv.buckets:
                self._feed_proposal(batch, 0)
                dims = self._proposal_dims(batch, bucket)
                self._steps.capture(proposal_profile(self._config, batch), dims)

    def capture_draft_accept_graph(self, batch_sizes: Iterable[int]) -> None:
        """Capture the draft step of newest tokens for these batch sizes, between batches."""
        self.caches.reset(0)
        widths = [self._accept_width] if self._accept_width else self._widths()
        for batch in self._sizes(batch_sizes):
            for bucket in self.caches.kv.buckets:
                for width in widths:
                    self._ops.feed_prefill(
                        self._buffers, np.zeros((batch, width), np.int64), [1] * batch
                    )
                    dims = InferenceDims.accept(batch, width, bucket)
                    self._steps.capture(accept_profile(self._config, batch), dims)

    def close(self) -> None:
        """Free captured graphs and the engine."""
        self._steps.executor.close()

    def _fill(self, entries: DraftEntries, source: Tensor) -> None:
        rows, width = entries.token_ids.shape
        caches = self.caches
        caches.reserve(max(caches.row_lengths) + width)
        # A row without an entry runs padding, which nobody reads and nothing keeps.
        lengths = [max(1, length) for length in entries.lengths]
        self._ops.feed_prefill(self._buffers, entries.token_ids, lengths, entries.first)
        flat = entries.hidden.reshape(1, -1)
        self._tree_ops.gather_rows(source, self._places(source), flat, self._input)
        self._clear(self._own, rows, width)

    def _padded(self, entries: DraftEntries) -> DraftEntries:
        """The entries in the batch and width of a captured step."""
        rows, width = entries.token_ids.shape
        batch, wide = self._steps.padded(rows), self._accept_width or width
        if (batch, wide) == (rows, width):
            return entries
        spare = ((0, batch - rows), (0, wide - width))
        return DraftEntries(
            np.pad(entries.token_ids, spare),
            entries.lengths + [1] * (batch - rows),
            entries.first + [0] * (batch - rows),
            np.pad(entries.hidden, spare, constant_values=-1),
        )

    def _feed_proposal(self, batch: int, level: int) -> InferenceDims:
        top_k = self._drafting.drafting_top_k
        shape = (batch, (level + 1) * top_k, top_k)
        self._tree_ops.feed_proposal(self._buffers, self._proposal, self._lengths, shape)
        return self._proposal_dims(batch, self.caches.kv.bucket)

    def _proposal_dims(self, batch: int, bucket: int) -> InferenceDims:
        drafting = self._drafting
        return InferenceDims.proposal(
            batch, drafting.proposal_size, drafting.drafting_top_k, bucket
        )

    def _clear(self, tensor: Tensor, rows: int, width: int) -> None:
        nothing = np.full((1, rows * width), -1, np.int32)
        self._tree_ops.gather_rows(tensor, 1, nothing, tensor)

    def _sizes(self, batch_sizes: Iterable[int]) -> list[int]:
        return sorted({self._steps.padded(size) for size in batch_sizes})

    def _widths(self) -> list[int]:
        return list(range(1, self._drafting.most_accepted + 1))

    @staticmethod
    def _places(source: Tensor) -> int:
        rows, width, _ = source.shape
        return rows * width


def _hidden_buffers(io: PipelineIO) -> tuple[Tensor, Tensor, ProposalBuffers]:
    given, own, proposal = io.hidden_states_input, io.hidden_states_from_draft, io.proposal
    if given is None or own is None or proposal is None:
        raise HearthError("internal", "these step buffers are not those of a draft engine")
    return given, own, proposal
