import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.decoding.completion import complete
from runtime.decoding.context import DecodingInferenceContext, RowState
from runtime.decoding.limits import check_row
from runtime.decoding.metrics import StageMetrics
from runtime.decoding.options import RuntimeOptions, effective_config
from runtime.decoding.vanilla import VanillaStrategy
from runtime.device.stream import HostStream
from runtime.engine_folder import verify_folder
from runtime.engine_runner import LLMEngineRunner
from runtime.errors import HearthError
from runtime.executor.engine import EngineOptions
from runtime.executor.engine_executor import EngineExecutor
from runtime.executor.graph_cache import GraphCounters
from runtime.pipeline_io import PipelineIO
from runtime.request import GenerationRequest, GenerationResponse, RowRequest, RowToken
from runtime.sampling.limits import check_sampling
from runtime.shared_resources import SharedResources
from runtime.text import Tokenizer

__all__ = ["LLMInferenceRuntime", "RuntimeOptions", "StepResult"]


class StepResult(msgspec.Struct):
    """What one step gave; times in seconds of the monotonic clock."""

    kind: Literal["prefill", "decode"]
    tokens: list[RowToken]
    started: float
    ended: float


class LLMInferenceRuntime:
    """Generates for synchronous batches: begin, step while rows are active, end.

    It belongs to one thread. Row numbers are always those of the caller's order.
    """

    def __init__(self, runner: LLMEngineRunner) -> None:
        self.config = runner.get_engine_config()
        self.max_batch = self.config.max_supported_batch_size
        self.capacity = self.config.max_kv_cache_capacity
        self.prefill_metrics = StageMetrics()
        self.generation_metrics = StageMetrics()
        self._runner = runner
        self._caches = runner.get_kv_cache()
        self._strategy = VanillaStrategy(runner)
        self._context: DecodingInferenceContext | None = None

    @classmethod
    def open(cls, folder: Path, options: RuntimeOptions | None = None) -> "LLMInferenceRuntime":
        """Open an engine folder; raises `engine_*`, `out_of_memory` or `invalid_value`."""
        options = options or RuntimeOptions()
        stored = load_config(folder)
        verify_folder(folder, stored, digests=options.verify)
        engine = EngineOptions(threads=options.threads, spin=options.spin)
        return cls.create(effective_config(stored, options), folder, engine)

    @classmethod
    def create(
        cls, config: LLMEngineRunnerConfig, folder: Path, options: EngineOptions
    ) -> "LLMInferenceRuntime":
        """Build a runtime with the limits of `config` over a folder that was checked before."""
        resources = SharedResources.create_for_llm(config, folder)
        io = PipelineIO.create_for_llm(config)
        executor = EngineExecutor.create_for_llm(folder, config, options)
        return cls(LLMEngineRunner(config, executor, io, resources, HostStream()))

    @property
    def active(self) -> bool:
        """Whether a row of the batch goes on."""
        return self._context is not None and self._context.any_live

    @property
    def counters(self) -> GraphCounters:
        """Graphs captured, hit, missed and failed so far."""
        return self._runner.executor.counters

    def check(self, row: RowRequest) -> None:
        """Refuse a row that `begin` would refuse; the error names the field."""
        check_row(self.config, row)
        check_sampling(row.sampling, self.config.output_vocab_size)

    def begin(self, rows: Sequence[RowRequest]) -> None:
        """Take a batch; refuses it whole, naming the field, when a row cannot be served."""
        if self._context is not None:
            raise HearthError("internal", "end the running batch before the next begins")
        if not 1 <= len(rows) <= self.max_batch:
            raise HearthError(
                "invalid_value", f"a batch has 1 to {self.max_batch} rows, not {len(rows)}", "rows"
            )
        for row in rows:
            self.check(row)
        context = DecodingInferenceContext(rows, self.config)
        self._runner.reset(len(rows))
        self._context = context

    def step(self) -> StepResult:
        """Run one prefill chunk or one decode step; rows that ended have left before it.

        Raises `executor_failed` when the engine fails; the batch is lost then and must be ended.
        """
        started = time.monotonic()
        context = self._evict()
        prefill = context.has_prompt_left
        step = self._strategy.prefill_step if prefill else self._strategy.decode_step
        try:
            outcome = step(context)
        except BaseException:
            context.fail_all()
            raise
        ended = time.monotonic()
        metrics = self.prefill_metrics if prefill else self.generation_metrics
        metrics.record(outcome.filled, ended - started)
        return StepResult("prefill" if prefill else "decode", outcome.tokens, started, ended)

    def cancel(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""
        if self._context is not None:
            self._context.cancel(row)

    def unfinished(self) -> list[tuple[int, list[int]]]:
        """The rows that would go on, in the caller's order, with all tokens beyond the prompt."""
        if self._context is None:
            return []
        return sorted((row.index, row.generated) for row in self._context.live_rows)

    def end(self) -> None:
        """Drop the batch; slots that may hold non-finite numbers are zeroed."""
        if self._context is not None:
            self._zero_failed(self._context)
            self._context = None
            self._runner.reset(0)

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture the decode step of these batch sizes; only between batches."""
        if self._context is not None:
            raise HearthError("internal", "capture between batches, not in one")
        if not all(1 <= size <= self.max_batch for size in batch_sizes):
            raise HearthError(
                "invalid_value", f"a batch has 1 to {self.max_batch} rows", "batch_sizes"
            )
        self._runner.capture_vanilla_decoding_graph(batch_sizes)

    def handle_request(
        self, request: GenerationRequest, tokenizer: Tokenizer | None = None
    ) -> GenerationResponse:
        """Generate for a whole batch; without a tokenizer there is no text and no stop string."""
        return complete(self, request, tokenizer)

    def close(self) -> None:
        """Drop the batch, captured graphs and the engine."""
        self.end()
        self._runner.close()

    def _evict(self) -> DecodingInferenceContext:
        """Let rows that ended leave the batch and the caches."""
        context = self._context
        if context is None or not context.any_live:
            raise HearthError("internal", "no row is active: begin a batch before a step")
        if not context.all_live:
            self._zero_failed(context)
            self._caches.compact(context.evict())
        return context

    def _zero_failed(self, context: DecodingInferenceContext) -> None:
        for place, row in enumerate(context.rows):
            if row.state is RowState.FAILED:
                self._caches.zero_row(place)
