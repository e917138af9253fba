from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, DecodingRow, RowMove
from hearth.runtime.device.cache_storage import check_pages
from hearth.runtime.device.device import (
    AcceptedPath,
    PathShape,
    PendingPaths,
    RotaryTables,
    SamplerBuffers,
    StepBuffers,
    check_splice,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import RowPositions
from hearth.runtime.reference.ops import (
    PageCopy,
    copy_pages,
    fill_positions,
    fill_rotary,
    finite_rows,
    look_up_embeddings,
    move_rows,
    slot_index,
    splice_rows,
    write_rows,
)
from hearth.runtime.reference.token_trees import (
    causal_words,
    commit_path,
    fill_causal,
    gather_rows,
    mask_words,
    path_moves,
)
from hearth.runtime.request import NO_ROW, RowToken
from hearth.runtime.sampling import RowSampler, TokenMasks, child_keys, sample_rows, walk_tree
from hearth.runtime.tensors.tensor import Tensor


class CpuImageOps:
    """Ops that copy embeddings and fill rotary tables with NumPy on the calling thread."""

    def splice(self, target: Tensor, place: int, rows: NDArray[Any]) -> None:
        """Write `rows` over the rows of the buffer from `place` on."""
        check_splice(target, place, rows)
        splice_rows(target.array, place, rows)

    def clear(self, target: Tensor, places: int) -> None:
        """Zero the first rows of a buffer."""
        target.view((places, target.shape[-1])).fill(0)

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        """Fill cosine and sine of a row."""
        for table, out in ((tables.cos_of, tables.cos), (tables.sin_of, tables.sin)):
            fill_rotary(out.array[row], table.array, tables.axes.array, positions)


class CpuCacheStorage:
    """The K/V buffers of all layers in host memory."""

    def __init__(self, buffers: Sequence[Tensor], heads: int, head_dim: int) -> None:
        self._buffers = tuple(buffers)
        self._heads = heads
        self._head_dim = head_dim

    def write(
        self,
        fresh: Sequence[Tensor],
        start: Tensor,
        shape: tuple[int, int, int],
        first: int = 0,
    ) -> None:
        """Put new rows [B, heads, S, D] from slot `start` on; `shape` is (B, S, slots)."""
        rows, width, slots = shape
        index = slot_index(start.array[:rows], self._heads, width)
        new = (rows, self._heads, width, self._head_dim)
        for cache, tensor in zip(self._buffers, fresh, strict=True):
            write_rows(self._view(cache, first + rows, slots)[first:], tensor.view(new), index)

    def commit_path(self, nodes: NDArray[np.int32], starts: Sequence[int], slots: int) -> None:
        """Move slot `starts[b] + nodes[b, i]` to `starts[b] + i` in every buffer."""
        moves = path_moves(nodes, np.array(starts), self._heads, slots)
        if moves.source.size:
            for tensor in self._buffers:
                commit_path(self._view(tensor, len(nodes), slots), moves)

    def move(self, moves: Sequence[RowMove], slots: tuple[int, int]) -> None:
        """Re-lay the rows of every buffer."""
        for tensor in self._buffers:
            move_rows(tensor.array.reshape(-1), moves, self._heads, self._head_dim, slots)

    def zero(self, row: int, begin: int, end: int, slots: int) -> None:
        """Zero cache slots of a row in every buffer."""
        for tensor in self._buffers:
            self._view(tensor, row + 1, slots)[row, :, begin:end] = 0

    def save(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy slots of rows into pages."""
        self._copy_pages(pool, copies, slots, save=True)

    def load(self, pool: Tensor, copies: Sequence[PageCopy], slots: int) -> None:
        """Copy pages into slots of rows."""
        self._copy_pages(pool, copies, slots, save=False)

    def read_row(self, row: int, length: int, slots: int) -> list[NDArray[Any]]:
        """Copies of a row's first slots, [heads, length, D] a buffer."""
        views = (self._view(tensor, row + 1, slots) for tensor in self._buffers)
        return [view[row, :, :length].copy() for view in views]

    def write_row(self, row: int, arrays: Sequence[NDArray[Any]], slots: int) -> None:
        """Write copies back into a row."""
        for tensor, array in zip(self._buffers, arrays, strict=True):
            self._view(tensor, row + 1, slots)[row, :, : array.shape[1]] = array

    def _copy_pages(
        self, pool: Tensor, copies: Sequence[PageCopy], slots: int, *, save: bool
    ) -> None:
        rows = self._buffers[0].shape[0]
        check_pages(pool, self._buffers, copies, rows, slots)
        for number, tensor in enumerate(self._buffers):
            copy_pages(pool.array[:, number], self._view(tensor, rows, slots), copies, save=save)

    def _view(self, tensor: Tensor, rows: int, slots: int) -> NDArray[Any]:
        return tensor.view((rows, self._heads, slots, self._head_dim))


_CHECKED = RowToken(NO_ROW, -1)

Row = TypeVar("Row")


class Ready(Generic[Row]):
    """Results of the rows of a step, sampled when it was queued."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def result(self) -> list[Row]:
        """The rows."""
        return self._rows


class CpuBatchSampler:
    """Sampler with NumPy on the calling thread."""

    captured_sampler = None

    def __init__(self, buffers: SamplerBuffers) -> None:
        self._vocab_size = buffers.logits.shape[-1]
        self._logits = buffers.logits.array.reshape(-1, self._vocab_size)
        self._lengths = buffers.lengths.array
        self._next_tokens = buffers.next_tokens.array
        self._trees = buffers.trees
        self._rows: list[RowSampler] = []

    def reorder(self, reorder: BatchReorder) -> None:
        """Let rows move with their newest tokens; take settings and histories of new rows."""
        self._rows = reorder.settle(self._rows, self._assign)
        tokens = self._next_tokens
        for source, target, _ in reorder.moves:
            tokens[target] = tokens[source]

    def sample(
        self,
        rows: int,
        first: int = 0,
        picked: int | None = None,
        masks: TokenMasks = (),
    ) -> Ready[RowToken | None]:
        """Sample the first `picked` of the rows from place `first` on; check the others."""
        end = rows if picked is None else picked
        samples = self._pick(self._logits[:end], first, masks) if end else []
        if end < rows:
            finite = finite_rows(self._logits[end:rows]).tolist()
            samples += [_CHECKED if one else None for one in finite]
        return Ready(samples)

    def verify(
        self, rows: int, width: int, masks: Sequence[TokenMasks] = ()
    ) -> Ready[AcceptedPath | None]:
        """Walk each row's tree by the logits [rows, width, V] of its nodes."""
        trees = self._trees
        if trees is None:
            raise HearthError("internal", "this sampler was made without token trees")
        logits = self._logits[: rows * width].reshape(rows, width, self._vocab_size)
        keys = child_keys(trees.ids.view((rows, width)), trees.parents.view((rows, width)))
        starts = self._lengths[:rows].tolist()
        # As in `sample_rows`: what leaves the range of float32 has weight 0 or is refused.
        with np.errstate(over="ignore"):
            walks = [
                walk_tree(
                    logits[row],
                    keys[row],
                    sampler,
                    starts[row] + 1,
                    masks[row] if masks else (),
                )
                for row, sampler in enumerate(self._rows[:rows])
            ]
        paths = [None if walk is None else AcceptedPath(*walk) for walk in walks]
        for row, path in enumerate(paths):
            if path is not None:
                self._next_tokens[row] = path.samples[-1].token_id
                self._lengths[row] += len(path.nodes)
        return Ready(paths)

    def _assign(self, row: DecodingRow) -> RowSampler:
        return RowSampler(row.options, row.token_ids, row.prompt_length, self._vocab_size)

    def _pick(
        self, logits: NDArray[np.float32], first: int, masks: TokenMasks
    ) -> list[RowToken | None]:
        last = first + len(logits)
        samplers = self._rows[first:last]
        positions = self._lengths[first:last].tolist()
        samples = sample_rows(logits, samplers, positions, masks)
        for sampler, sample in zip(samplers, samples, strict=True):
            if sample is not None:
                sampler.accept(sample.token_id)
        tokens = [-1 if sample is None else sample.token_id for sample in samples]
        self._next_tokens[first:last] = tokens
        return samples


class DecodeViews(NamedTuple):
    """Views of the buffers that a decode step of a fixed row count reads and writes."""

    starts: NDArray[Any]
    positions: NDArray[Any]
    selected: NDArray[Any]
    masks: list[NDArray[Any]]
    table: NDArray[Any]
    token_ids: NDArray[Any]
    embeds: NDArray[Any]

    @classmethod
    def of(cls, buffers: StepBuffers, rows: int) -> "DecodeViews":
        """Make the views of the first `rows` rows of `buffers`."""
        masks = (buffers.tree_mask, buffers.packed_mask)
        table = buffers.embedding.array
        return cls(
            starts=buffers.lengths.array[:rows],
            positions=buffers.attention_pos_id.view((rows, 1))[:, 0],
            selected=buffers.last_token_ids.view((rows, 1)),
            masks=[mask.view((rows, 1, 1)) for mask in masks if mask is not None],
            table=table,
            token_ids=buffers.next_tokens.view((rows,))[:, None],
            embeds=buffers.inputs_embeds.view((rows, 1, table.shape[1])),
        )


class CpuStepOps:
    """Ops that fill step inputs with NumPy on the calling thread."""

    def __init__(self) -> None:
        self._decodes: dict[tuple[StepBuffers, int], DecodeViews] = {}

    def feed_prefill(
        self,
        buffers: StepBuffers,
        token_ids: NDArray[np.int64],
        lengths: Sequence[int],
        first: Sequence[int] | None = None,
    ) -> None:
        """Feed embeddings [B, S], positions, the last token of each row, and a causal mask."""
        rows, width = token_ids.shape
        index = buffers.lengths.dtype
        counts = np.array(lengths, index)
        begin = buffers.lengths.array[:rows] if first is None else np.array(first, index)
        fill_positions(buffers.attention_pos_id.view((rows, width)), begin, counts)
        np.subtract(counts, 1, out=buffers.last_token_ids.view((rows, 1))[:, 0])
        if buffers.tree_mask is not None:
            fill_causal(buffers.tree_mask.view((rows, width, width)))
        if buffers.packed_mask is not None:
            buffers.packed_mask.view((rows, width, mask_words(width)))[...] = causal_words(width)
        embed(buffers, token_ids)

    def put_entries(
        self,
        buffers: StepBuffers,
        token_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
        first: Sequence[int],
        places: Sequence[Sequence[int]],
        *,
        filled: Sequence[int],
    ) -> None:
        """Keep the entries."""
        tokens, states = np.array(token_ids, np.int64), np.array(places, np.int32)
        self._entries = buffers, tokens, list(lengths), first, filled, states

    def enter_paths(
        self, _buffers: StepBuffers, _paths: PendingPaths, _lengths: Tensor, _shape: PathShape
    ) -> None:
        """Raise `internal`: no work of a CPU runs asynchronously."""
        raise HearthError("internal", "paths are entered by the host")

    def feed_entries(
        self,
        buffers: StepBuffers,
        source: Tensor,
        out: Tensor,
        grown: Tensor,
        shape: tuple[int, int],
    ) -> None:
        """Feed the entries that were put last, and gather their hidden states."""
        kept, token_ids, lengths, first, filled, places = self._entries
        size = source.shape[-1]
        if kept != buffers or token_ids.shape != shape:
            raise HearthError("internal", f"entries of {token_ids.shape} were put for {shape}")
        self.feed_prefill(buffers, token_ids, [max(1, one) for one in lengths], first)
        buffers.lengths.array[: shape[0]] = filled
        grown.array[: shape[0]] = np.add(filled, lengths)
        flat, rows = source.array.reshape(1, -1, size), places.reshape(1, -1)
        gather_rows(flat, rows, out.view((*shape, size)).reshape(1, -1, size))

    def feed_decode(self, buffers: StepBuffers, rows: int) -> None:
        """Feed the newest token of each row."""
        views = self._decodes.get((buffers, rows))
        if views is None:
            views = self._decodes[buffers, rows] = DecodeViews.of(buffers, rows)
        views.positions[...] = views.starts
        views.selected.fill(0)
        for mask in views.masks:
            mask.fill(1)
        look_up_embeddings(views.table, views.token_ids, views.embeds)

    def set_lengths(self, start: Tensor, lengths: Sequence[int]) -> None:
        """Write the lengths, and 0 behind them."""
        start.array[:] = 0
        start.array[: len(lengths)] = lengths

    def advance(self, start: Tensor, rows: int) -> None:
        """Add 1 to the first rows."""
        start.array[:rows] += 1


def embed(buffers: StepBuffers, token_ids: NDArray[Any]) -> None:
    """Look up token ids [B, S] for the step's `inputs_embeds`."""
    shape = (*token_ids.shape, buffers.embedding.shape[1])
    look_up_embeddings(buffers.embedding.array, token_ids, buffers.inputs_embeds.view(shape))
