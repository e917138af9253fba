"""Batches of rows on a runtime in this process, with their tokens and their time by step."""

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowRequest, RowToken


def rows_of(prompts: Sequence[list[int]], options: RequestOptions) -> list[RowRequest]:
    """Make a row for each prompt, given as token ids."""
    return [
        RowRequest(token_ids=token_ids, prompt_length=len(token_ids), options=options)
        for token_ids in prompts
    ]


class TimedStep(NamedTuple):
    """A step, its seconds, and the rows that were live in it."""

    kind: Literal["prefill", "decode", "verify", "tower"]
    seconds: float
    rows: int


class BatchRun(msgspec.Struct, kw_only=True):
    """Tokens of a batch; seconds of prefill and generation on the host's clock."""

    rows: list[list[RowToken]]
    steps: list[TimedStep]
    prefill_s: float
    generation_s: float

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each row."""
        return [[token.token_id for token in row] for row in self.rows]

    @property
    def generated(self) -> int:
        """Tokens of the generation: all but the first of each row, which the prefill gives."""
        return sum(len(row) - 1 for row in self.rows)


def run_batch(runtime: LLMInferenceRuntime, rows: Sequence[RowRequest]) -> BatchRun:
    """Generate a batch to its end; raises the error of a row that fails."""
    tokens: list[list[RowToken]] = [[] for _ in rows]
    steps: list[TimedStep] = []
    live = len(rows)
    started = prefilled = time.perf_counter()
    numbers = runtime.admit(rows)
    try:
        while runtime.active:
            result = runtime.step()
            steps.append(TimedStep(result.kind, result.ended - result.started, live))
            if result.kind == "prefill":
                prefilled = time.perf_counter()
            for token in result.tokens:
                if token.error is not None:
                    raise HearthError("non_finite", f"row {token.row} failed: {token.error}")
                tokens[token.row].append(token)
                live -= token.finish is not None
    finally:
        ended = time.perf_counter()
        for number in numbers:
            runtime.leave(number)
    return BatchRun(
        rows=tokens, steps=steps, prefill_s=prefilled - started, generation_s=ended - prefilled
    )
