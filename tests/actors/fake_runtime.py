"""A runtime that the executor can drive without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.generation.vision_scheduler import TowerResult, TowerWork
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.request import RowRequest, RowToken
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics


class FakeGrammars:
    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self.compiling: set[str] = set()
        self.kept: list[set[str]] = []

    def ready(self, grammar: str) -> bool:
        if grammar == "bad":
            raise HearthError("grammar_invalid", "it has an error", "grammar")
        return grammar not in self.compiling

    def keep_only(self, wanted: Iterable[str]) -> None:
        self.kept.append({*wanted})


class FakeRuntime:
    """Rows of tokens 100, 101, ...; a prefill step is of all rows that have no token yet.

    Of a row whose first token is in `cached` so many tokens come from the prefix cache.

    `before_step` may wait or raise; `before_admit` may raise. Rows whose first token is in
    `spoiled` fail with `spoil` in their prefill, those of `poisoned` by themselves.
    """

    def __init__(self, places: int = 8) -> None:
        self.places = places
        self.before_step: Callable[[int], None] = lambda _step: None
        self.before_admit: Callable[[], None] = lambda: None
        self.spoiled: set[int] = set()
        self.poisoned: set[int] = set()
        self.spoil = HearthError("out_of_memory", "no room")
        self.rows: dict[int, RowRequest] = {}
        self.generated: dict[int, list[int]] = {}
        self.begun: list[int] = []
        self.left: list[int] = []
        self.unpinned: list[int] = []
        self.adapter = ""
        self.adapters: dict[str, Path] = {}
        self.switches: list[str] = []
        self.cached: dict[int, int] = {}
        self.steps = 0
        self.prefill_metrics = StageMetrics()
        self.generation_metrics = StageMetrics()
        self.speculation_metrics = EagleGenerationMetrics()
        self.prefix_metrics: PrefixMetrics | None = None
        self.multimodal_metrics = MultimodalMetrics()
        self.failures: list[HearthError] = []
        self.memory: dict[str, int] = {}
        self.graphs: dict[str, GraphCounters] = {}
        self.device_free: int | None = None
        self.queue_by = 0.0
        self.grammars: FakeGrammars | None = None
        self.pictures: list[TowerWork] = []
        self._joining: list[int] = []
        self._placed: dict[int, float] = {}
        # Seconds of prefill for which a row has not decoded yet.
        self._owed: dict[int, float] = {}

    @property
    def active(self) -> bool:
        return bool(self.rows or self.pictures)

    @property
    def free(self) -> int:
        return self.places - len(self.rows)

    def get_multimodal_metrics(self) -> MultimodalMetrics:
        return self.multimodal_metrics

    def check(self, row: RowRequest) -> None:
        if row.token_ids[0] < 0:
            raise HearthError("invalid_value", "token -1 is not in the vocabulary", "token_ids")
        if row.options.adapter and row.options.adapter not in self.adapters:
            raise HearthError("adapter_unknown", "there is no such adapter", "adapter")

    def load_adapter(self, name: str, source: Path) -> None:
        if not source.name:
            raise HearthError("adapter_invalid", "there is nothing in the folder", "adapter.json")
        self.adapters[name] = source

    def unload_adapter(self, name: str) -> None:
        assert self.adapter != name or not self.rows, "rows run with it"
        del self.adapters[name]

    def admit(self, rows: Sequence[RowRequest], numbers: Sequence[int] | None = None) -> list[int]:
        assert len(rows) <= self.free
        assert numbers is not None
        self.before_admit()
        self.begun.append(len(rows))
        if not self.rows:
            self.adapter = rows[0].options.adapter
            self.switches.append(self.adapter)
        assert {row.options.adapter for row in rows} == {self.adapter}
        for number, row in zip(numbers, rows, strict=True):
            self.rows[number] = row
            self.generated[number] = list(row.token_ids[row.prompt_length :])
            self._placed[number], self._owed[number] = time.monotonic(), inf
        self._joining += numbers
        return list(numbers)

    def run_tower(self, work: TowerWork) -> None:
        self.pictures.append(work)

    def _tower(self, work: TowerWork, started: float) -> StepResult:
        """Every embedding of a picture is its number; one without a patch that is not 0 fails."""
        error = None if work.patches.any() else HearthError("non_finite", "no numbers")
        work.out[...] = work.number
        results = [TowerResult(work.number, 0.25, error)]
        return StepResult("tower", [], started, time.monotonic(), pictures=results)

    def step(self) -> StepResult:
        started = time.monotonic()
        self.steps += 1
        if self.pictures:
            self.before_step(self.steps)
            return self._tower(self.pictures.pop(0), started)
        try:
            self.before_step(self.steps)
        except Exception:
            self.rows, self._joining = {}, []
            raise
        joining = [number for number in self._joining if number in self.rows]
        self._joining = []
        result = StepResult("prefill" if joining else "decode", [], started, 0.0)
        for number in joining or list(self.rows):
            row = self.rows[number]
            if joining and row.token_ids[0] in self.spoiled:
                result.failure = self.spoil
                result.tokens.append(RowToken(number, -1, error=self.spoil.code))
                del self.rows[number]
                continue
            if row.token_ids[0] in self.poisoned:
                result.tokens.append(RowToken(number, -1, error="non_finite"))
                del self.rows[number]
                continue
            if joining:
                result.slot_times[number] = self._placed[number]
            if joining and row.token_ids[0] in self.cached:
                result.cached[number] = self.cached[row.token_ids[0]]
            done = self.generated[number]
            done.append(100 + len(done))
            ends = len(done) == row.options.max_tokens
            result.tokens.append(RowToken(number, done[-1], finish="length" if ends else None))
            if ends:
                del self.rows[number]
        result.ended = time.monotonic()
        taken = result.ended - started
        for number in joining or list(self._owed):
            self._owed[number] = taken if joining else self._owed[number] - taken
        return result

    def leave(self, row: int) -> None:
        self.left.append(row)
        self.rows.pop(row, None)

    def take_failures(self) -> list[HearthError]:
        failures, self.failures = self.failures, []
        return failures

    def unpin(self, client: int) -> None:
        self.unpinned.append(client)

    def release(self, row: int, *, paid: bool = False) -> list[int] | None:
        if paid and self._owed.get(row, inf) > 0:
            return None
        return None if self.rows.pop(row, None) is None else self.generated[row]
