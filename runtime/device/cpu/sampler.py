from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.arrangement import Arrangement, Seat
from runtime.device.device import AcceptedPath, SamplerBuffers
from runtime.errors import HearthError
from runtime.reference.ops import finite_rows
from runtime.sampling import RowSampler, Sample, child_keys, sample_rows, walk_tree

_CHECKED = Sample(-1)

Row = TypeVar("Row")


class Ready(Generic[Row]):
    """What the rows of a step gave, picked at once."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def result(self) -> list[Row]:
        """The rows."""
        return self._rows


class CpuBatchSampler:
    """Picks tokens with NumPy on the calling thread."""

    recording = None

    def __init__(self, buffers: SamplerBuffers) -> None:
        self._vocab_size = buffers.logits.shape[-1]
        self._logits = buffers.logits.array.reshape(-1, self._vocab_size)
        self._lengths = buffers.lengths.array
        self._next_tokens = buffers.next_tokens.array
        self._trees = buffers.trees
        self._rows: list[RowSampler] = []

    def rearrange(self, arrangement: Arrangement) -> None:
        """Let rows move with their newest tokens; take settings and histories of new ones."""
        self._rows = arrangement.settle(self._rows, self._seat)
        tokens = self._next_tokens
        for source, target, _ in arrangement.moves:
            tokens[target] = tokens[source]

    def sample(self, rows: int, first: int = 0, picked: int | None = None) -> Ready[Sample | None]:
        """Pick for the first `picked` of the rows from place `first` on; check the others."""
        end = rows if picked is None else picked
        samples = self._pick(self._logits[:end], first) if end else []
        if end < rows:
            finite = finite_rows(self._logits[end:rows]).tolist()
            samples += [_CHECKED if one else None for one in finite]
        return Ready(samples)

    def verify(self, rows: int, width: int) -> Ready[AcceptedPath | None]:
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
                walk_tree(logits[row], keys[row], sampler, starts[row] + 1)
                for row, sampler in enumerate(self._rows[:rows])
            ]
        paths = [None if walk is None else AcceptedPath(*walk) for walk in walks]
        for row, path in enumerate(paths):
            if path is not None:
                self._next_tokens[row] = path.samples[-1].token_id
                self._lengths[row] += len(path.nodes)
        return Ready(paths)

    def _seat(self, seat: Seat) -> RowSampler:
        row = seat.request
        return RowSampler(row.options, row.token_ids, row.prompt_length, self._vocab_size)

    def _pick(self, logits: NDArray[np.float32], first: int) -> list[Sample | None]:
        last = first + len(logits)
        samplers = self._rows[first:last]
        positions = self._lengths[first:last].tolist()
        samples = sample_rows(logits, samplers, positions)
        for sampler, sample in zip(samplers, samples, strict=True):
            if sample is not None:
                sampler.accept(sample.token_id)
        tokens = [-1 if sample is None else sample.token_id for sample in samples]
        self._next_tokens[first:last] = tokens
        return samples
