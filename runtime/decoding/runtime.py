import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from runtime.decoding.answer_check import AnswerCheck, AnswerReport
from runtime.decoding.assembly import assemble
from runtime.decoding.batch_runtime import StepResult
from runtime.decoding.budget import fit_deployment
from runtime.decoding.completion import complete
from runtime.decoding.deployment import DeploymentConfig, load_engines, resolve_deployment
from runtime.decoding.limits import check_row
from runtime.decoding.metrics import StageMetrics
from runtime.decoding.speculative import PendingRound, SpeculativeStrategy
from runtime.decoding.vanilla import PendingStep, VanillaStrategy
from runtime.device.device import BatchSampler, Device
from runtime.device.open import open_device
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.executor.engine import EngineOptions
from runtime.executor.graph_cache import GraphCounters
from runtime.known_answer import KnownAnswer
from runtime.memory.system import available_memory
from runtime.options import RuntimeOptions
from runtime.request import GenerationRequest, GenerationResponse, RowRequest, check_options
from runtime.rows import DecodingInferenceContext, RowState
from runtime.steps.engine_runner import LLMEngineRunner
from runtime.text import Tokenizer
from runtime.undo import undoing


class LLMInferenceRuntime:
    """Generates for synchronous batches: admit, step while rows are active, release.

    It belongs to one thread. Row numbers are always those of the caller's order. On a device
    that works beside the host, a step is queued before the tokens of the step before are read;
    what only the host can decide then takes effect a step later, and the token that was picked
    too many is dropped. Where rows leave, and at the end of a batch, the host waits for the step
    that runs: only then is it known which rows hold finite numbers.
    """

    def __init__(
        self,
        runner: LLMEngineRunner,
        device: Device,
        sampler: BatchSampler,
        speculation: SpeculativeStrategy | None = None,
    ) -> None:
        self.config = runner.get_engine_config()
        self.max_batch = self.config.max_supported_batch_size
        self.capacity = self.config.max_kv_cache_capacity
        self.prefill_metrics = StageMetrics()
        self.generation_metrics = StageMetrics()
        self.speculation_metrics = EagleGenerationMetrics()
        if speculation is not None:
            self.speculation_metrics = speculation.metrics
        self.chosen = ""
        """Why batch and capacity are smaller than exported, where nobody asked for that."""
        self._runner = runner
        self._caches = runner.get_kv_cache()
        self._device = device
        self._sampler = sampler
        self._strategy = VanillaStrategy(runner, sampler)
        self._speculation = speculation
        self._context: DecodingInferenceContext | None = None
        self._queued: deque[PendingStep | PendingRound] = deque()
        self._collected = 0.0

    @classmethod
    def open(cls, folder: Path, options: RuntimeOptions | None = None) -> "LLMInferenceRuntime":
        """Open an engine folder, with as many rows and as much capacity as fit where none is asked.

        Raises `engine_*`, `out_of_memory` or `invalid_value`.
        """
        options = options or RuntimeOptions()
        engine = EngineOptions(threads=options.threads, spin=options.spin)
        engines = load_engines(folder, options)
        # A context of a GPU that shares this memory is among what is predicted.
        host = available_memory()
        device = open_device(resolve_deployment(*engines, options).base.device)
        with undoing() as undo:
            undo.callback(device.close)
            deployment = fit_deployment(engines, options, host, device.free_memory())
        return cls.create(deployment, folder, engine, device)

    @classmethod
    def create(
        cls,
        deployment: DeploymentConfig,
        folder: Path,
        options: EngineOptions,
        device: Device | None = None,
    ) -> "LLMInferenceRuntime":
        """Build a runtime over a folder that was checked before.

        It owns `device`, which is opened when none is given.
        """
        config = deployment.base
        device = open_device(config.device) if device is None else device
        with undoing() as undo:
            undo.callback(device.close)
            runtime = cls(*assemble(deployment, folder, options, device))
        runtime.chosen = deployment.chosen
        return runtime

    @property
    def active(self) -> bool:
        """Whether a row of the batch goes on."""
        return self._context is not None and self._context.any_live

    @property
    def counters(self) -> GraphCounters:
        """Graphs captured, hit, missed and failed so far."""
        return self._runner.executor.counters

    def check(self, row: RowRequest) -> None:
        """Refuse a row that `admit` would refuse; the error names the field."""
        check_row(self.config, row)
        if row.options.speculation and self._speculation is None:
            raise HearthError(
                "unsupported_option",
                "this engine runs without speculation: leave it to the daemon",
                "speculation",
            )
        check_options(row.options, self.config.output_vocab_size)

    def admit(self, rows: Sequence[RowRequest]) -> None:
        """Take a batch; refuses it whole, naming the field, when a row cannot be served.

        A batch whose rows have all ended is over; while one is active no other can join.
        """
        if self.active:
            raise HearthError("internal", "rows are active: release them before others come")
        if not 1 <= len(rows) <= self.max_batch:
            raise HearthError(
                "invalid_value", f"a batch has 1 to {self.max_batch} rows, not {len(rows)}", "rows"
            )
        for row in rows:
            self.check(row)
        self.release()
        context = DecodingInferenceContext(rows, self.config)
        self._runner.reset(len(rows))
        self._sampler.begin([rows[row.index] for row in context.rows])
        if self._speculation is not None:
            self._speculation.proposer.begin(len(rows))
        self._context = context

    def step(self) -> StepResult:
        """Give the result of the next prefill chunk or decode step.

        Rows that ended have left before a step is queued. Raises `executor_failed` or
        `device_lost` when the engine fails; the batch is lost then.
        """
        context = self._context
        if context is None or not context.any_live:
            raise HearthError("internal", "no row is active: admit rows before a step")
        speculation, queued = self._speculation, self._queued
        try:
            if speculation is not None and self._evict(context) and speculation.wanted(context):
                # A round needs every token to be known to the host: the queue runs empty first.
                if not queued:
                    queued.append(speculation.round(context))
            else:
                while len(queued) <= self._device.steps_ahead and self._evict(context):
                    prefill = context.has_prompt_left
                    queue = self._strategy.prefill_step if prefill else self._strategy.decode_step
                    pending = queue(context)
                    queued.append(pending)
                    if speculation is not None:
                        speculation.follow(pending)
            step = queued.popleft()
            tokens = step.collect()
        except BaseException:
            queued.clear()
            context.fail_all()
            raise
        # A step that waited behind another began when that one ended.
        started = max(step.started, self._collected)
        self._collected = time.monotonic()
        seconds = self._collected - started
        metrics = self.prefill_metrics if step.kind == "prefill" else self.generation_metrics
        metrics.record(step.filled, seconds)
        if speculation is not None and step.kind == "decode":
            speculation.record_step(len(step.rows), seconds)
        return StepResult(step.kind, tokens, started, self._collected, step.rounds)

    def leave(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""
        if self._context is not None:
            self._context.leave(row)

    def release(self) -> list[tuple[int, list[int]]]:
        """Let all rows leave: those that would go on, with all their tokens beyond the prompt.

        They come in the caller's order. Slots that may hold non-finite numbers are zeroed.
        """
        context, self._context = self._context, None
        if context is None:
            return []
        unfinished = sorted((row.index, row.generated) for row in context.live_rows)
        try:
            self._zero_failed(context)
        finally:
            self._queued.clear()
            self._runner.reset(0)
        return unfinished

    def capture(self, batch_sizes: Sequence[int]) -> list[str]:
        """Capture the decode and speculation steps of these batch sizes; only between batches.

        Tells what makes steps slower than they could be.
        """
        if self._context is not None:
            raise HearthError("internal", "capture between batches, not in one")
        if not all(1 <= size <= self.max_batch for size in batch_sizes):
            raise HearthError(
                "invalid_value", f"a batch has 1 to {self.max_batch} rows", "batch_sizes"
            )
        self._runner.capture_vanilla_decoding_graph(batch_sizes)
        counters = [self.counters]
        if self._speculation is not None:
            self._speculation.capture(batch_sizes)
            counters.append(self._speculation.proposer.counters)
        slower = [
            f"{one.failed_captures} steps are not captured: {one.failure}"
            for one in counters
            if one.failed_captures
        ]
        # The next prefill of TensorRT would undo it.
        if self.config.backend != "tensorrt" and not self._device.settle():
            slower.append("the GPU takes no second context")
        return slower

    def check_answer(self, answer: KnownAnswer) -> AnswerReport:
        """Force the engine through a known answer; only between batches.

        Raises `wrong_answer` where the engine gives another, and what a step raises.
        """
        if self._context is not None:
            raise HearthError("internal", "check the answer between batches, not in one")
        return AnswerCheck(answer, self._runner, self._sampler).run()

    def handle_request(
        self, request: GenerationRequest, tokenizer: Tokenizer | None = None
    ) -> GenerationResponse:
        """Generate for a whole batch; without a tokenizer there is no text and no stop string."""
        return complete(self, request, tokenizer)

    def close(self) -> None:
        """Drop the batch, captured graphs and the engine.

        What one of them raises does not keep the others back; `device_lost` is not raised again.
        """
        try:
            with ExitStack() as closing:
                closing.callback(self._runner.close)
                if self._speculation is not None:
                    closing.callback(self._speculation.proposer.close)
                self.release()
        except HearthError as error:
            if error.code != "device_lost":
                raise

    def _evict(self, context: DecodingInferenceContext) -> bool:
        """Let rows that ended leave; whether any go on."""
        if not context.all_run_on:
            self._zero_failed(context)
            mapping = context.evict()
            self._caches.compact(mapping)
            self._sampler.compact(mapping)
            if self._speculation is not None:
                self._speculation.proposer.compact(mapping)
        return bool(context.rows)

    def _zero_failed(self, context: DecodingInferenceContext) -> None:
        """Zero what the rows hold that failed, or that fail in a step whose tokens are unread.

        It waits for such a step: a row that leaves, and the copy that a row which moves leaves
        behind, cannot be found again.
        """
        # A round is collected by the call that queues it.
        unread = (step for step in self._queued if isinstance(step, PendingStep))
        spoiled = {row.index for step in unread for row in step.spoiled()}
        for place, row in enumerate(context.rows):
            if row.state is RowState.FAILED or row.index in spoiled:
                self._caches.zero_row(place)
                if self._speculation is not None:
                    self._speculation.proposer.zero_row(place)
