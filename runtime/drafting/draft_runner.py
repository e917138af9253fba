from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.device.device import Device, StepBuffers, TreeBuffers
from runtime.drafting.growth import DraftSteps, choose_growth
from runtime.executor.engine_executor import EngineExecutor
from runtime.images import EmbeddingStore
from runtime.options import EagleDraftingConfig
from runtime.steps.bindings import StepBindings
from runtime.steps.image_merge import ImageMerge, ImagePiece
from runtime.steps.pipeline_io import DraftIO
from runtime.steps.recordings import Execute, Recordings
from runtime.steps.shared_resources import SharedResources
from runtime.tensors.dims import PROFILE_CONTEXT, InferenceDims
from runtime.tensors.profiles import generation_profile, prefill_width
from runtime.tensors.tensor import Tensor

_CACHES = 1


class DraftEntries(NamedTuple):
    """New entries of the draft's cache, of rows that lie together, padded at the right.

    `token_ids` [rows, S]; `lengths` and `first` positions, one a row; `hidden` [rows, S] says
    where each entry's hidden state lies in the base's `hidden_states`, -1 for padding. `images`
    are what stands in place of tokens of a prompt.
    """

    token_ids: NDArray[np.int64]
    lengths: list[int]
    first: list[int]
    hidden: NDArray[np.int32]
    images: Sequence[ImagePiece] = ()


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
        self._prompt = io.prompt
        self._images: ImageMerge | None = None
        if embeddings is not None:
            self._images = ImageMerge(embeddings, device, self._prompt.inputs.inputs_embeds, ())
        self._steps, growing = (
            StepBindings(
                config, executor, step, resources, device, prompt=prompt, cache_index=_CACHES
            )
            for step, prompt in ((io.entries, io.prompt), (io.growing, None))
        )
        self.caches = self._steps.caches
        self._recorded = Recordings(config, device, self._steps)
        self._growth = choose_growth(
            DraftSteps(
                config=config,
                drafting=drafting,
                device=device,
                bindings=growing,
                inputs=self._inputs,
                proposal=io.proposal,
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
        """The width of a prefill step of so many entries a row, of rows that begin by `start`."""
        room = self._config.max_kv_cache_capacity - start
        return prefill_width(self._config, entries, room)

    def save_hidden(
        self, source: Tensor, places: Sequence[int], target: Tensor, first: int
    ) -> None:
        """Copy hidden states at `places` of `source` to those from `first` on of `target`.

        Both are read flat: [1, all places, W].
        """
        rows, count, size = source.shape
        out = target.part("waiting_hidden_states", first * size, (len(places), size))
        self._tree_ops.gather_rows(source, rows * count, np.array([places], np.int32), out)

    def accept_shape(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and entries a row of the step that appends `width` entries to `rows` rows."""
        return self._steps.padded(rows), self._accept_width or width

    def execute_accept_step(self, entries: DraftEntries, source: Tensor, rows: int) -> None:
        """Append the entries of the first rows' newest tokens; a proposal begins from the last.

        `entries` are of an `accept_shape`; what those behind the first `rows` hold is dropped.
        """
        batch, width = entries.token_ids.shape
        self.caches.reserve(max(self.caches.row_lengths[:rows]) + width)
        self._ops.put_entries(
            self._inputs, entries.token_ids, entries.lengths, entries.first, entries.hidden
        )
        self._steps.prepare(*self._accept_step(batch, width, self.caches.kv.bucket))
        self._recorded.run(partial(self._enter, source, batch, width))
        self._steps.keep(rows, width)
        self.caches.commit(entries.lengths[:rows])

    def execute_proposal_steps(self, rows: int) -> None:
        """Grow the proposals of the first rows to full depth; the cache keeps nothing of them."""
        self._growth.grow(rows, self._steps.padded(rows))

    def finish(self, trees: TreeBuffers, speculating: Sequence[bool], width: int) -> None:
        """Plant the best `width` nodes of every row; node 0 alone where not speculating."""
        batch = self._steps.padded(len(speculating))
        every = [*speculating, *[False] * (batch - len(speculating))]
        self._growth.finish(trees, every, width)

    def capture_draft_proposal_graph(self, batch_sizes: Iterable[int]) -> None:
        """Capture the draft step of a proposal for these batch sizes, between batches."""
        for batch, bucket in self._steps.captured(batch_sizes):
            self._growth.capture(batch, bucket)

    def capture_draft_accept_graph(self, batch_sizes: Iterable[int], source: Tensor) -> None:
        """Capture the draft step of newest tokens for these batch sizes, between batches.

        Their hidden states will be in `source`.
        """
        fixed = self._accept_width
        widths = [fixed] if fixed else range(1, self._drafting.most_accepted + 1)
        for (batch, bucket), width in product(self._steps.captured(batch_sizes), widths):
            tokens, places = np.zeros((batch, width), np.int64), np.zeros((batch, width), np.int32)
            self._ops.put_entries(self._inputs, tokens, [1] * batch, [0] * batch, places)
            self._ops.feed_entries(self._inputs, source, self._hidden, (batch, width))
            work = partial(self._enter, source, batch, width)
            self._recorded.capture(*self._accept_step(batch, width, bucket), work)

    def close(self) -> None:
        """Free captured graphs and the engine."""
        with ExitStack() as closing:
            closing.callback(self.executor.close)
            closing.callback(self._growth.close)
            closing.callback(self._recorded.close)

    def _accept_step(self, batch: int, width: int, bucket: int) -> tuple[int, InferenceDims]:
        profile = generation_profile(self._config, batch, second=True)
        return profile, InferenceDims.accept(batch, width, bucket)

    def _enter(self, source: Tensor, batch: int, width: int, execute: Execute) -> None:
        self._ops.feed_entries(self._inputs, source, self._hidden, (batch, width))
        execute(self._steps.stream)

    def _fill(self, inputs: StepBuffers, entries: DraftEntries, source: Tensor) -> None:
        # A row without an entry runs padding, which nobody reads and nothing keeps.
        lengths = [max(1, length) for length in entries.lengths]
        self._ops.feed_prefill(inputs, entries.token_ids, lengths, entries.first)
        flat = entries.hidden.reshape(1, -1)
        rows, places, _ = source.shape
        self._tree_ops.gather_rows(source, rows * places, flat, self._hidden)
