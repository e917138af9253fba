from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.device.arrays import finite_rows
from runtime.device.device import SamplerBuffers
from runtime.request import RowRequest
from runtime.sampling import RowSampler, Sample, sample_rows

_CHECKED = Sample(-1)


class ReadySamples:
    """Samples that were picked at once."""

    def __init__(self, samples: list[Sample | None]) -> None:
        self._samples = samples

    def result(self) -> list[Sample | None]:
        """The samples."""
        return self._samples


class CpuBatchSampler:
    """Picks tokens with NumPy on the calling thread."""

    def __init__(self, buffers: SamplerBuffers) -> None:
        self._buffers = buffers
        self._vocab_size = buffers.logits.shape[-1]
        self._rows: list[RowSampler] = []

    def begin(self, rows: Sequence[RowRequest]) -> None:
        """Take the settings and histories of a batch."""
        self._rows = [
            RowSampler(row.sampling, row.token_ids, row.prompt_length, self._vocab_size)
            for row in rows
        ]

    def sample(self, rows: int, waiting: int = 0) -> ReadySamples:
        """Pick for rows `waiting` to `rows`; the rows before are only checked."""
        logits = self._buffers.logits.view((rows, self._vocab_size))
        samples: list[Sample | None] = []
        if waiting:
            healthy = finite_rows(logits[:waiting]).tolist()
            samples += [_CHECKED if fine else None for fine in healthy]
        if rows > waiting:
            samples += self._pick(logits[waiting:], waiting, rows)
        return ReadySamples(samples)

    def compact(self, mapping: Sequence[int]) -> None:
        """Keep the rows that stay, with their newest tokens."""
        kept = [row for row, target in enumerate(mapping) if target >= 0]
        self._rows = [self._rows[row] for row in kept]
        tokens = self._buffers.next_tokens.array
        tokens[: len(kept)] = tokens[kept]

    def _pick(self, logits: NDArray[np.float32], first: int, last: int) -> list[Sample | None]:
        samplers = self._rows[first:last]
        positions = self._buffers.start.array[first:last].tolist()
        samples = sample_rows(logits, samplers, positions)
        for sampler, sample in zip(samplers, samples, strict=True):
            if sample is not None:
                sampler.accept(sample.token_id)
        tokens = [-1 if sample is None else sample.token_id for sample in samples]
        self._buffers.next_tokens.array[first:last] = tokens
        return samples
