"""What steps take, by the runtime's own clock, and what follows from that."""

import time
from collections.abc import Sequence

from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.metrics import StageMetrics
from runtime.decoding.prefill_budget import Chunk, PrefillBudget, Prompt
from runtime.decoding.queue_time import QueueTime
from runtime.decoding.speculative import PendingRound, SpeculativeStrategy
from runtime.decoding.tower_turns import TowerTurns
from runtime.decoding.vanilla import PendingStep
from runtime.request import RowToken
from runtime.rows import DecodingRow
from runtime.tensors.profiles import captured_widths


class Pace:
    """Takes note of steps, and says how wide a chunk may be and when to queue a step."""

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        prefill_budget: float,
        speculation: SpeculativeStrategy | None,
        turns: TowerTurns,
    ) -> None:
        self.prefill_metrics = StageMetrics()
        self.generation_metrics = StageMetrics()
        self.collected = 0.0
        """When the last step was collected."""
        self._budget = PrefillBudget(
            config.prefill_chunk,
            config.max_kv_cache_capacity,
            prefill_budget,
            captured_widths(config),
        )
        self._queue_time = QueueTime()
        self._speculation = speculation
        self._turns = turns

    def chunk(self, joiners: Sequence[DecodingRow], *, limited: bool) -> Chunk:
        """The next chunk of joiners; `limited` where rows decode."""
        prompts = [Prompt(row.filled, row.prompt_left) for row in joiners]
        return self._budget.choose(prompts, limited=limited)

    def queue_by(self, host_s: float) -> float:
        """When to queue a step behind one that took `host_s` to queue."""
        return self.collected + self._queue_time.behind(host_s)

    def began(self, started: float) -> float:
        """When a step began that was queued at `started`: behind another it waited for its end."""
        return max(started, self.collected)

    def ended(self) -> float:
        """Take note that a step was collected just now."""
        self.collected = time.monotonic()
        return self.collected

    def record(
        self, step: PendingStep | PendingRound, tokens: Sequence[RowToken]
    ) -> tuple[float, float]:
        """Take note of a step that was collected just now; when it began and ended.

        A prefill counts what it computed, any other step the `tokens` that it gave to rows.
        """
        began = self.began(step.started)
        ended = self.ended()
        seconds = ended - began
        if step.kind == "prefill":
            self.prefill_metrics.record(step.filled, seconds, step.host_s)
            self._budget.record_prefill(step.computed, seconds)
            return began, ended
        given = sum(token.error is None for token in tokens)
        self.generation_metrics.record(given, seconds, step.host_s)
        self._budget.record_decode(seconds)
        self._turns.record_decode(seconds)
        if step.kind == "decode":
            self._queue_time.record(seconds)
            if self._speculation is not None:
                self._speculation.record_step(len(step.rows), seconds)
        return began, ended
