from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.context import DecodingInferenceContext, DecodingRow
from runtime.device.cpu import finite_rows
from runtime.engine_runner import LLMEngineRunner, Logits
from runtime.request import RowToken
from runtime.sampling import sample_rows


class StepOutcome(NamedTuple):
    """What a step reports, and how many tokens it put into the caches."""

    tokens: list[RowToken]
    filled: int


class VanillaStrategy:
    """One token a row and step, from the base engine alone."""

    def __init__(self, runner: LLMEngineRunner) -> None:
        self._runner = runner
        self._chunk = runner.get_engine_config().prefill_chunk

    def prefill_step(self, context: DecodingInferenceContext) -> StepOutcome:
        """Prefill the next chunk; rows whose prompt ends in it report their first token.

        Those rows are the last of the step, as rows begin longest first.
        """
        rows = context.prefilling
        token_ids, lengths = self._chunks(rows)
        logits = self._runner.execute_prefill_step(token_ids, lengths)
        for row, added in zip(rows, lengths, strict=True):
            row.filled += added
        going_on = sum(1 for row in rows if row.prompt_left)
        reports = _fail_non_finite(rows[:going_on], logits[:going_on])
        reports += _sample(rows[going_on:], logits[going_on:])
        return StepOutcome(reports, sum(lengths))

    def decode_step(self, context: DecodingInferenceContext) -> StepOutcome:
        """Run the newest token of every row and report the next one."""
        rows = context.rows
        token_ids = np.array([row.token_ids[-1] for row in rows], np.int64)
        logits = self._runner.execute_vanilla_decoding_step(token_ids)
        for row in rows:
            row.filled += 1
        return StepOutcome(_sample(rows, logits), len(rows))

    def _chunks(self, rows: Sequence[DecodingRow]) -> tuple[NDArray[np.int64], list[int]]:
        """The next piece of each prompt, padded at the right with token 0, and its length."""
        lengths = [min(self._chunk, row.prompt_left) for row in rows]
        token_ids = np.zeros((len(rows), max(lengths)), np.int64)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            token_ids[place, :length] = row.initial[row.filled : row.filled + length]
        return token_ids, lengths


def _sample(rows: Sequence[DecodingRow], logits: Logits) -> list[RowToken]:
    if not rows:
        return []
    samples = sample_rows(
        logits, [row.sampler for row in rows], [len(row.token_ids) for row in rows]
    )
    return [row.take(sample) for row, sample in zip(rows, samples, strict=True)]


def _fail_non_finite(rows: Sequence[DecodingRow], logits: Logits) -> list[RowToken]:
    """Stop rows in the middle of their prompt whose caches already hold non-finite numbers."""
    healthy = finite_rows(logits).tolist()
    return [row.fail("non_finite") for row, fine in zip(rows, healthy, strict=True) if not fine]
