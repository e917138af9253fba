from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import PathShape, PendingPaths, StepBuffers
from runtime.errors import HearthError
from runtime.reference.ops import fill_positions, look_up_embeddings
from runtime.reference.token_trees import causal_words, fill_causal, gather_rows, mask_words
from runtime.tensors.tensor import Tensor


class DecodeViews(NamedTuple):
    """What a decode step of so many rows reads and writes, which never moves."""

    starts: NDArray[Any]
    positions: NDArray[Any]
    selected: NDArray[Any]
    masks: list[NDArray[Any]]
    table: NDArray[Any]
    token_ids: NDArray[Any]
    embeds: NDArray[Any]

    @classmethod
    def of(cls, buffers: StepBuffers, rows: int) -> "DecodeViews":
        """Those of the first rows of these buffers."""
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
    """Fills step inputs with NumPy on the calling thread."""

    def __init__(self) -> None:
        self._decodes: dict[tuple[StepBuffers, int], DecodeViews] = {}

    def feed_prefill(
        self,
        buffers: StepBuffers,
        token_ids: NDArray[np.int64],
        lengths: Sequence[int],
        first: Sequence[int] | None = None,
    ) -> None:
        """Embeds [B, S], positions, the last token of each row, and a causal mask."""
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
        """Keep them."""
        tokens, states = np.array(token_ids, np.int64), np.array(places, np.int32)
        self._entries = buffers, tokens, list(lengths), first, filled, states

    def enter_paths(
        self, _buffers: StepBuffers, _paths: PendingPaths, _lengths: Tensor, _shape: PathShape
    ) -> None:
        """Nothing here runs behind the host's back."""
        raise HearthError("internal", "paths are entered by the host")

    def feed_entries(
        self,
        buffers: StepBuffers,
        source: Tensor,
        out: Tensor,
        grown: Tensor,
        shape: tuple[int, int],
    ) -> None:
        """Feed what was put last, and gather its hidden states."""
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
        """Embeds the newest token of each row."""
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
