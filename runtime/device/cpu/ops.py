from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.device.arrays import fill_positions, look_up_embeddings
from runtime.device.device import StepBuffers
from runtime.tensors.tensor import Tensor


class CpuStepOps:
    """Fills step inputs with NumPy on the calling thread."""

    def feed_prefill(
        self, buffers: StepBuffers, token_ids: NDArray[np.int64], lengths: Sequence[int]
    ) -> None:
        """Embeds [B, S], positions and the last token of each row."""
        rows, width = token_ids.shape
        counts = np.array(lengths, buffers.start.dtype)
        positions = buffers.positions.view((rows, width))
        fill_positions(positions, buffers.start.array[:rows], counts)
        np.subtract(counts, 1, out=buffers.select.view((rows, 1))[:, 0])
        self._embed(buffers, token_ids)

    def feed_decode(self, buffers: StepBuffers, rows: int) -> None:
        """Embeds the newest token of each row."""
        buffers.positions.view((rows, 1))[:, 0] = buffers.start.array[:rows]
        buffers.select.view((rows, 1)).fill(0)
        self._embed(buffers, buffers.next_tokens.view((rows,))[:, None])

    def set_lengths(self, start: Tensor, lengths: Sequence[int]) -> None:
        """Write the lengths, and 0 behind them."""
        start.array[:] = 0
        start.array[: len(lengths)] = lengths

    def advance(self, start: Tensor, rows: int) -> None:
        """Add 1 to the first rows."""
        start.array[:rows] += 1

    def _embed(self, buffers: StepBuffers, token_ids: NDArray[np.int64]) -> None:
        shape = (*token_ids.shape, buffers.table.shape[1])
        look_up_embeddings(buffers.table.array, token_ids, buffers.embeds.view(shape))
