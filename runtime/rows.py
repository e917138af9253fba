from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from runtime.config import LLMEngineRunnerConfig
from runtime.request import FinishReason, RowRequest, RowToken
from runtime.sampling import Sample


class RowState(Enum):
    """Whether a row goes on, or how it left."""

    LIVE = "live"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


# Before Python 3.12 a member is looked up by Python code, which every row would run in each step.
_LIVE = RowState.LIVE


def tokens_to_generate(row: RowRequest, config: LLMEngineRunnerConfig) -> int:
    """How many tokens a row is to generate in all: what it asks for, or as many as fit."""
    asked = row.options.max_tokens
    return config.max_kv_cache_capacity - row.prompt_length if asked is None else asked


class DecodingRow:
    """One row of a running batch.

    `index` is the row's place in the caller's order. `filled` counts the tokens that the caches
    hold once all queued steps have ended; `unplanned` the tokens up to its limit that none of these
    steps picks. `plain` rows take no trees, as their own have failed.
    """

    __slots__ = (
        "_end_tokens",
        "_longest",
        "filled",
        "index",
        "initial",
        "options",
        "plain",
        "prompt_length",
        "state",
        "token_ids",
        "unplanned",
    )

    def __init__(self, index: int, request: RowRequest, config: LLMEngineRunnerConfig) -> None:
        self.index = index
        self.token_ids = list(request.token_ids)
        self.initial: NDArray[np.int64] = np.array(request.token_ids, np.int64)
        self.prompt_length = request.prompt_length
        self.options = request.options
        self.plain = False
        self.filled = 0
        self.state = _LIVE
        self._longest = request.prompt_length + tokens_to_generate(request, config)
        self.unplanned = self._longest - len(self.token_ids)
        self._end_tokens = frozenset(() if request.options.ignore_eos else config.eos_token_ids)

    @property
    def prompt_left(self) -> int:
        """Tokens still to be prefilled."""
        return max(0, len(self.initial) - self.filled)

    @property
    def runs_on(self) -> bool:
        """Whether a further step makes sense: the row is live and its limit is not yet queued."""
        return self.unplanned > 0 and self.state is _LIVE

    @property
    def generated(self) -> list[int]:
        """The tokens beyond the prompt."""
        return self.token_ids[self.prompt_length :]

    def take(self, sample: Sample | None) -> RowToken | None:
        """Append a sampled token, or fail when its logits were not finite, and report it.

        A row that left has nothing to report, nor has one whose logits were only checked.
        """
        if self.state is not _LIVE:
            return None
        if sample is None:
            return self.fail("non_finite")
        token_id = sample.token_id
        if token_id < 0:
            return None
        self.token_ids.append(token_id)
        finish: FinishReason | None = None
        if token_id in self._end_tokens:
            finish = "stop"
        elif len(self.token_ids) >= self._longest:
            finish = "length"
        if finish is not None:
            self.state = RowState.FINISHED
        return RowToken(self.index, token_id, sample.logprob, sample.top, finish)

    def fail(self, code: str) -> RowToken:
        """End the row with an error and report it."""
        self.state = RowState.FAILED
        return RowToken(self.index, -1, error=code)


class DecodingInferenceContext:
    """The rows of one batch and their way from the caller's order to the engine's.

    `rows[i]` is row i of the engine. Rows begin longest first, so that those with prompt left are
    always the first ones; eviction keeps the order. A row whose last token is still being picked
    has left `rows` and is live until that token is known.
    """

    def __init__(self, requests: Sequence[RowRequest], config: LLMEngineRunnerConfig) -> None:
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].token_ids))
        self.rows = [DecodingRow(index, requests[index], config) for index in order]
        self._by_index = {row.index: row for row in self.rows}

    @property
    def live_rows(self) -> list[DecodingRow]:
        """The rows that have not ended."""
        return [row for row in self._by_index.values() if row.state is _LIVE]

    @property
    def any_live(self) -> bool:
        """Whether a row has not ended."""
        return any(row.state is _LIVE for row in self._by_index.values())

    @property
    def has_prompt_left(self) -> bool:
        """Whether a prompt is still to be prefilled; the first row has the longest."""
        return bool(self.rows and self.rows[0].prompt_left)

    @property
    def all_run_on(self) -> bool:
        """Whether every row of the engine goes on: there is nothing to evict."""
        return all(row.runs_on for row in self.rows)

    @property
    def prefilling(self) -> list[DecodingRow]:
        """The rows with prompt left: the first ones of the batch."""
        return [row for row in self.rows if row.prompt_left]

    def leave(self, index: int) -> None:
        """Let the caller's row `index` leave; unknown and ended rows are ignored."""
        row = self._by_index.get(index)
        if row is not None and row.state is _LIVE:
            row.state = RowState.CANCELLED

    def fail_all(self) -> None:
        """Mark every row as failed: what the caches hold of it is unknown."""
        for row in (*self.rows, *self.live_rows):
            row.state = RowState.FAILED

    def evict(self) -> list[int]:
        """Drop the rows that do not go on; gives for each old row its new place, or -1."""
        mapping: list[int] = []
        kept: list[DecodingRow] = []
        for row in self.rows:
            stays = row.runs_on
            mapping.append(len(kept) if stays else -1)
            if stays:
                kept.append(row)
        self.rows = kept
        return mapping
