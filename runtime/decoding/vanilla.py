import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.device.device import BatchSampler, PendingSamples
from runtime.request import RowRound, RowToken
from runtime.rows import DecodingInferenceContext, DecodingRow
from runtime.steps.engine_runner import LLMEngineRunner


class PendingStep(msgspec.Struct, frozen=True):
    """A step that was queued: its rows, in the engine's order, and the tokens to come.

    `filled` counts the tokens that it puts into the caches, `lengths` those of each row, `started`
    is in seconds of the monotonic clock.
    """

    kind: Literal["prefill", "decode"]
    rows: list[DecodingRow]
    samples: PendingSamples
    filled: int
    started: float
    lengths: list[int]

    @property
    def rounds(self) -> list[RowRound]:
        """None: these are no rounds of speculation."""
        return []

    def spoiled(self) -> list[DecodingRow]:
        """Wait for the rows whose numbers were not finite, also those that left meanwhile."""
        samples = self.samples.result()
        return [row for row, sample in zip(self.rows, samples, strict=True) if sample is None]

    def collect(self) -> list[RowToken]:
        """Wait for the tokens and hand them to their rows; rows that left report nothing."""
        samples = self.samples.result()
        return [
            report
            for row, sample in zip(self.rows, samples, strict=True)
            if (report := row.take(sample)) is not None
        ]


class VanillaStrategy:
    """One token a row and step, from the base engine alone."""

    def __init__(self, runner: LLMEngineRunner, sampler: BatchSampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._chunk = runner.get_engine_config().prefill_chunk

    def prefill_step(self, context: DecodingInferenceContext) -> PendingStep:
        """Queue the next chunk; rows whose prompt ends in it get their first token.

        Those rows are the last of the step, as rows begin longest first.
        """
        started = time.monotonic()
        rows = context.prefilling
        token_ids, lengths = self._chunks(rows)
        self._runner.execute_prefill_step(token_ids, lengths)
        for row, added in zip(rows, lengths, strict=True):
            row.filled += added
        waiting = sum(1 for row in rows if row.prompt_left)
        for row in rows[waiting:]:
            row.unplanned -= 1
        samples = self._sampler.sample(len(rows), waiting=waiting)
        return PendingStep("prefill", rows, samples, sum(lengths), started, lengths)

    def decode_step(self, context: DecodingInferenceContext) -> PendingStep:
        """Queue a step that runs the newest token of every row and picks the next."""
        started = time.monotonic()
        rows = context.rows
        self._runner.execute_vanilla_decoding_step(len(rows))
        for row in rows:
            row.filled += 1
            row.unplanned -= 1
        samples = self._sampler.sample(len(rows))
        return PendingStep("decode", rows, samples, len(rows), started, [1] * len(rows))

    def _chunks(self, rows: Sequence[DecodingRow]) -> tuple[NDArray[np.int64], list[int]]:
        """The next piece of each prompt, padded at the right with token 0, and its length."""
        lengths = [min(self._chunk, row.prompt_left) for row in rows]
        token_ids = np.zeros((len(rows), max(lengths)), np.int64)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            token_ids[place, :length] = row.initial[row.filled : row.filled + length]
        return token_ids, lengths
