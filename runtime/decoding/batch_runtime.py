from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from runtime.decoding.metrics import StageMetrics
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.executor.graph_cache import GraphCounters
from runtime.request import RowRequest, RowRound, RowToken


class StepResult(msgspec.Struct):
    """What one step gave; times in seconds of the monotonic clock.

    A row may have several tokens, in their order. `rounds` are the rows that speculated. `failure`
    is why a prefill failed: its rows end with that error, and the others go on.
    """

    kind: Literal["prefill", "decode", "verify"]
    tokens: list[RowToken]
    started: float
    ended: float
    rounds: list[RowRound] = []
    failure: HearthError | None = None


class BatchRuntime(Protocol):
    """What a loop asks of a runtime: admit rows, step while any is active, let rows leave.

    Rows are numbered in the order in which they were admitted, from 0 again when none is active.
    """

    prefill_metrics: StageMetrics
    generation_metrics: StageMetrics
    """Decode steps and rounds of speculation."""
    speculation_metrics: EagleGenerationMetrics
    memory: dict[str, int]
    """Bytes by part that the engines need with all rows full, as `hearth check` tells them."""

    @property
    def graphs(self) -> Mapping[str, GraphCounters]:
        """What became of graphs and steps so far, of the base and of a draft."""

    @property
    def device_free(self) -> int | None:
        """Free bytes of the device's own memory; None where it has none of its own."""

    @property
    def active(self) -> bool:
        """Whether a row goes on."""

    @property
    def free(self) -> int:
        """How many rows can take places before the next step."""

    @property
    def queue_by(self) -> float:
        """When the next step is to be queued, by the monotonic clock; in the past for at once.

        Rows that are admitted before then wait for no further step of the others.
        """

    def check(self, row: RowRequest) -> None:
        """Refuse a row that `admit` would refuse; the error names the field."""

    def admit(self, rows: Sequence[RowRequest]) -> list[int]:
        """Take rows, all or none, and give their numbers; raises naming the field at fault."""

    def step(self) -> StepResult:
        """Run one prefill chunk, one decode step or one round of speculation."""

    def leave(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""

    def release(self, row: int) -> list[int] | None:
        """Let a row leave that would go on: its tokens beyond the prompt; None if it has ended."""
