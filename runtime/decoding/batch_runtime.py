import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from runtime.decoding.in_flight import StepKind
from runtime.decoding.metrics import StageMetrics
from runtime.decoding.tower_turns import TowerResult, TowerWork
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.executor.graph_cache import GraphCounters
from runtime.prefix.metrics import PrefixMetrics
from runtime.request import RowRequest, RowRound, RowToken
from runtime.rows import DecodingRow, RowState
from runtime.steps.image_merge import MultimodalMetrics


class StepResult(msgspec.Struct):
    """What one step gave; times in seconds of the monotonic clock.

    A row may have several tokens, in their order. `rounds` are the rows that speculated. `failure`
    is why a prefill failed: its rows end with that error, and the others go on. `pictures` are
    those that a vision tower is done with. `cached` tells, with the first token of a row, how many
    tokens of it came from the prefix cache, where any did.
    """

    kind: StepKind
    tokens: list[RowToken]
    started: float
    ended: float
    rounds: list[RowRound] = []
    failure: HearthError | None = None
    pictures: list[TowerResult] = []
    cached: dict[int, int] = {}


class BatchRuntime(Protocol):
    """What a loop asks of a runtime: admit rows, step while any is active, let rows leave.

    Rows are numbered in the order in which they were admitted, from 0 again when none is active.
    """

    memory: dict[str, int]
    """Bytes by part that the engines need with all rows full, as `hearth check` tells them."""

    @property
    def prefill_metrics(self) -> StageMetrics:
        """Prompt chunks."""

    @property
    def generation_metrics(self) -> StageMetrics:
        """Decode and verify steps."""

    @property
    def speculation_metrics(self) -> EagleGenerationMetrics:
        """What speculation has done; all zero where there is none."""

    @property
    def adapter(self) -> str:
        """The adapter that all rows share; "" for none."""

    def load_adapter(self, name: str, source: Path) -> None:
        """Load an adapter from a folder; raises naming what is at fault."""

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no row runs with; raises `adapter_unknown`."""

    @property
    def graphs(self) -> Mapping[str, GraphCounters]:
        """What became of graphs and steps so far, of the base and of a draft."""

    @property
    def prefix_metrics(self) -> PrefixMetrics | None:
        """What the prefix cache has done and holds; None where there is none."""

    def get_multimodal_metrics(self) -> MultimodalMetrics:
        """What images took so far; all zero for an engine that takes none."""

    def take_failures(self) -> list[HearthError]:
        """What went wrong without harm to any row, since this was asked the last time."""

    @property
    def device_free(self) -> int | None:
        """Free bytes of the device's own memory; None where it has none of its own."""

    @property
    def active(self) -> bool:
        """Whether a row goes on, or a picture waits for the vision tower."""

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

    def run_tower(self, work: TowerWork) -> None:
        """Let a vision tower encode a picture between steps, whose results tell of it.

        Raises `image_too_large`, and `internal` where there is no tower.
        """

    def step(self) -> StepResult:
        """Run one prefill chunk, one decode step, one round of speculation or a call of a tower."""

    def leave(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""

    def unpin(self, client: int) -> None:
        """Keep no longer what a client's rows have pinned in the prefix cache."""

    def release(self, row: int) -> list[int] | None:
        """Let a row leave that would go on: its tokens beyond the prompt; None if it has ended."""


def failed_chunk(rows: Sequence[DecodingRow], started: float, error: Exception) -> StepResult:
    """What a chunk reports that failed, for its rows alone; raises `device_lost` again."""
    if isinstance(error, MemoryError):
        error = HearthError(
            "out_of_memory", "no memory for a chunk of prompts: lower capacity or max_batch"
        )
    if not isinstance(error, HearthError) or error.code == "device_lost":
        raise error
    tokens = [row.fail(error.code) for row in rows if row.state is RowState.LIVE]
    return StepResult("prefill", tokens, started, time.monotonic(), failure=error)
