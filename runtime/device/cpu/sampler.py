from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.device.arrays import finite_rows
from runtime.device.device import AcceptedPath, SamplerBuffers
from runtime.errors import HearthError
from runtime.request import RowRequest
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

    def __init__(self, buffers: SamplerBuffers) -> None:
        self._buffers = buffers
        self._vocab_size = buffers.logits.shape[-1]
        self._rows: list[RowSampler] = []

    def begin(self, rows: Sequence[RowRequest]) -> None:
        """Take the settings and histories of a batch."""
        self._rows = [
            RowSampler(row.options, row.token_ids, row.prompt_length, self._vocab_size)
            for row in rows
        ]

    def sample(self, rows: int, waiting: int = 0) -> Ready[Sample | None]:
        """Pick for rows `waiting` to `rows`; the rows before are only checked."""
        logits = self._buffers.logits.view((rows, self._vocab_size))
        samples: list[Sample | None] = []
        if waiting:
            healthy = finite_rows(logits[:waiting]).tolist()
            samples += [_CHECKED if fine else None for fine in healthy]
        if rows > waiting:
            samples += self._pick(logits[waiting:], waiting, rows)
        return Ready(samples)

    def verify(self, rows: int, width: int) -> Ready[AcceptedPath | None]:
        """Walk each row's tree by the logits [rows, width, V] of its nodes."""
        trees = self._buffers.trees
        if trees is None:
            raise HearthError("internal", "this sampler was made without token trees")
        logits = self._buffers.logits.view((rows, width, self._vocab_size))
        keys = child_keys(trees.ids.view((rows, width)), trees.parents.view((rows, width)))
        starts = self._buffers.lengths.array[:rows].tolist()
        # As in `sample_rows`: what leaves the range of float32 has weight 0 or is refused.
        with np.errstate(over="ignore"):
            walks = [
                walk_tree(logits[row], keys[row], sampler, starts[row] + 1)
                for row, sampler in enumerate(self._rows[:rows])
            ]
        paths = [None if walk is None else AcceptedPath(*walk) for walk in walks]
        for row, path in enumerate(paths):
            if path is not None:
                self._buffers.next_tokens.array[row] = path.samples[-1].token_id
        return Ready(paths)

    def compact(self, mapping: Sequence[int]) -> None:
        """Keep the rows that stay, with their newest tokens."""
        kept = [row for row, target in enumerate(mapping) if target >= 0]
        self._rows = [self._rows[row] for row in kept]
        tokens = self._buffers.next_tokens.array
        tokens[: len(kept)] = tokens[kept]

    def _pick(self, logits: NDArray[np.float32], first: int, last: int) -> list[Sample | None]:
        samplers = self._rows[first:last]
        positions = self._buffers.lengths.array[first:last].tolist()
        samples = sample_rows(logits, samplers, positions)
        for sampler, sample in zip(samplers, samples, strict=True):
            if sample is not None:
                sampler.accept(sample.token_id)
        self._write_tokens(first, samples)
        return samples

    def _write_tokens(self, first: int, newest: Sequence[Sample | None]) -> None:
        tokens = [-1 if sample is None else sample.token_id for sample in newest]
        self._buffers.next_tokens.array[first : first + len(tokens)] = tokens
