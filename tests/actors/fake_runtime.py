"""A runtime that the executor can drive without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runtime.decoding.batch_runtime import StepResult
from runtime.decoding.metrics import StageMetrics
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.request import RowRequest, RowToken


class FakeRuntime:
    """Rows of tokens 100, 101, ...; `before_step` may wait or raise."""

    def __init__(self) -> None:
        self.before_step: Callable[[int], None] = lambda _step: None
        self.rows: dict[int, RowRequest] = {}
        self.generated: dict[int, list[int]] = {}
        self.begun: list[int] = []
        self.steps = 0
        self.prefill_metrics = StageMetrics()
        self.generation_metrics = StageMetrics()
        self.speculation_metrics = EagleGenerationMetrics()
        self._prefilled = False

    @property
    def active(self) -> bool:
        return bool(self.rows)

    def check(self, row: RowRequest) -> None:
        if row.token_ids[0] < 0:
            raise HearthError("invalid_value", "token -1 is not in the vocabulary", "token_ids")

    @property
    def free(self) -> int:
        return 8 - len(self.rows)

    def admit(self, rows: Sequence[RowRequest]) -> list[int]:
        self.begun.append(len(rows))
        self.rows = dict(enumerate(rows))
        self.generated = {
            index: list(row.token_ids[row.prompt_length :]) for index, row in self.rows.items()
        }
        self._prefilled = False
        return list(self.rows)

    def step(self) -> StepResult:
        started = time.monotonic()
        self.steps += 1
        self.before_step(self.steps)
        tokens = []
        for index, row in list(self.rows.items()):
            done = self.generated[index]
            done.append(100 + len(done))
            ends = len(done) == row.options.max_tokens
            tokens.append(RowToken(index, done[-1], finish="length" if ends else None))
            if ends:
                del self.rows[index]
        kind, self._prefilled = ("decode" if self._prefilled else "prefill"), True
        return StepResult(kind, tokens, started, time.monotonic())  # type: ignore[arg-type]  # one of the two

    def leave(self, row: int) -> None:
        self.rows.pop(row, None)

    def release(self, row: int) -> list[int] | None:
        return None if self.rows.pop(row, None) is None else self.generated[row]
