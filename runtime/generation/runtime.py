import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import inf
from pathlib import Path

from hearth.runtime.batch import DecodingInferenceContext, DecodingRow, RowOwner, RowState, all_left
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.device.open import open_device
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions, GraphCounters
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.generation.answer_check import AnswerCheck, AnswerReport
from hearth.runtime.generation.assembly import RuntimeParts, assemble
from hearth.runtime.generation.batch_runtime import (
    StepResult,
    check_row,
    failed_chunk,
    shared_adapter,
)
from hearth.runtime.generation.budget import fit_deployment
from hearth.runtime.generation.completion import complete
from hearth.runtime.generation.deployment import DeploymentConfig, load_engines
from hearth.runtime.generation.in_flight import AnyStep, InFlightStep, StepKind
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.generation.prefill_budget import PrefillBudget, Prompt
from hearth.runtime.generation.speculative import SpeculativeStrategy
from hearth.runtime.generation.step_times import StageMetrics, StepTimes
from hearth.runtime.generation.vanilla import VanillaStrategy
from hearth.runtime.generation.vision_scheduler import TowerWork, VisionBudget, VisionScheduler
from hearth.runtime.grammar import FIELD, GrammarMatcher, require
from hearth.runtime.images import EmbeddingStore
from hearth.runtime.known_answer import KnownAnswer
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.loading import ProgressCallback, no_progress
from hearth.runtime.lora.adapter import Adapter
from hearth.runtime.lora.stored import load_all
from hearth.runtime.memory.system import available_memory
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import (
    GenerationRequest,
    GenerationResponse,
    RowRequest,
    RowToken,
    check_options,
)
from hearth.runtime.runner.engine_runner import PromptGraphs
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from hearth.runtime.tensors.profiles import captured_widths, decode_batches
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.undo import undoing
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.weights.external_weight_manager import Loaded


class LLMInferenceRuntime:
    """Generate for rows that join and leave between two steps: admit, step while any is active.

    A runtime belongs to one thread. Decode and verify steps take all rows whose prompts are done,
    alternating with prefill chunks of the others. On a device that works beside the host, a step
    is queued before the tokens of the step before are read; what only the host can decide then
    takes effect a step later, and the token that was sampled too many is dropped.
    """

    def __init__(self, parts: RuntimeParts, prefill_budget: float = 1.0) -> None:
        runner, sampler, speculation = parts.runner, parts.sampler, parts.speculation
        self.chosen = ""
        """Reason for a smaller batch and capacity than exported without an option; else ""."""
        self.memory: dict[str, int] = {}
        self.refused_adapters: dict[str, HearthError] = {}
        """Errors of adapters that could not be loaded with the engine, by name."""
        self.grammars = parts.grammars
        """Compiler of the grammars of rows; None for rows without."""
        self._runner = runner
        self._device = parts.device
        self._vanilla = VanillaStrategy(runner, sampler)
        self._speculation = speculation
        self._prefix = parts.prefix
        owners: list[RowOwner] = [*runner.row_owners, sampler]
        room = 1
        if speculation is not None:
            owners.append(speculation.proposer)
            room = speculation.proposer.room
        config = runner.get_engine_config()
        self._context = DecodingInferenceContext(config, room, owners)
        self._times = times = StepTimes()
        self._prompts = PrefillBudget(
            config.prefill_chunk,
            config.max_kv_cache_capacity,
            prefill_budget,
            times.decode_s,
            captured_widths(config),
        )
        budget = VisionBudget(prefill_budget, times)
        self._vision = VisionScheduler(parts.tower, parts.device, budget, runner.multimodal_metrics)
        self._in_flight: deque[AnyStep] = deque()
        self._decode_next = False

    @classmethod
    def open(
        cls,
        folder: Path,
        options: RuntimeOptions | None = None,
        progress: ProgressCallback = no_progress,
        embeddings: EmbeddingStore | None = None,
    ) -> "LLMInferenceRuntime":
        """Open an engine folder, with as many rows and as much capacity as fit where none is asked.

        Embeddings of images that rows name are read from `embeddings`. Raises `engine_*`,
        `out_of_memory` or `invalid_value`.
        """
        options = options or RuntimeOptions()
        engine = EngineOptions(threads=options.threads, spin=options.spin, progress=progress)
        engines = load_engines(folder, options, progress)
        progress("opening", None)
        # A context of a GPU that shares this memory is among what is predicted.
        host = available_memory()
        device = open_device(engines.resolve(options).base.device)
        with undoing() as undo:
            undo.callback(device.close)
            deployment = fit_deployment(engines, options, host, device.free_memory())
        runtime = cls.create(deployment, folder, engine, device, embeddings)
        if options.adapters:
            with undoing() as undo:
                undo.callback(runtime.close)
                runtime.refused_adapters = runtime.load_adapters(Path(options.adapters))
        return runtime

    @classmethod
    def create(
        cls,
        deployment: DeploymentConfig,
        folder: Path,
        options: EngineOptions,
        device: Device | None = None,
        embeddings: EmbeddingStore | None = None,
    ) -> "LLMInferenceRuntime":
        """Build a runtime over a checked folder; it owns `device`, opened when none is given."""
        device = open_device(deployment.base.device) if device is None else device
        with undoing() as undo:
            undo.callback(device.close)
            parts = assemble(deployment, folder, options, device, embeddings=embeddings)
            runtime = cls(parts, deployment.prefill_budget)
        runtime.chosen, runtime.memory = deployment.chosen, predict_memory(deployment).device
        return runtime

    @property
    def config(self) -> LLMEngineRunnerConfig:
        """The configuration that the engine runs with."""
        return self._runner.get_engine_config()

    @property
    def max_batch(self) -> int:
        """The most rows that run together."""
        return self.config.max_supported_batch_size

    @property
    def capacity(self) -> int:
        """Tokens that a row holds."""
        return self._context.capacity

    @property
    def executor(self) -> EngineExecutor:
        """Executor of the base engine, for introspection."""
        return self._runner.executor

    @property
    def tower(self) -> VisionRunner | None:
        """Vision encoder on a GPU; None on the CPU, where the encoder process has its own."""
        return self._vision.runner

    @property
    def loaded_weights(self) -> Loaded | None:
        """Copied weights that the engine binds; None where it reads them itself."""
        return self._runner.loaded_weights

    @property
    def prefill_metrics(self) -> StageMetrics:
        """Metrics of prefill chunks."""
        return self._times.prefill

    @property
    def generation_metrics(self) -> StageMetrics:
        """Metrics of decode and verify steps."""
        return self._times.generation

    @property
    def speculation_metrics(self) -> EagleGenerationMetrics:
        """Speculation metrics; all zero without speculation."""
        return EagleGenerationMetrics() if self._speculation is None else self._speculation.metrics

    @property
    def prefix_metrics(self) -> PrefixMetrics | None:
        """Prefix cache metrics; None without a prefix cache."""
        return None if self._prefix is None else self._prefix.metrics

    def get_multimodal_metrics(self) -> MultimodalMetrics:
        """Return image metrics; all zero for an engine without images."""
        return self._runner.multimodal_metrics

    @property
    def counters(self) -> GraphCounters:
        """Graphs captured, hit, missed and failed so far."""
        return self._runner.executor.counters

    @property
    def graphs(self) -> Mapping[str, GraphCounters]:
        """The counters of the base, and of the draft where there is one."""
        if self._speculation is None:
            return {"base": self.counters}
        return {"base": self.counters, "draft": self._speculation.proposer.counters}

    @property
    def prompt_graphs(self) -> PromptGraphs:
        """Graphs of prefill steps, which `counters` counts too."""
        return self._runner.prompt_graphs

    @property
    def device_free(self) -> int | None:
        """Free bytes of the device's own memory; None where it has none of its own."""
        return self._device.free_memory()

    def take_failures(self) -> list[HearthError]:
        """Take the errors since the last call that harmed no row."""
        return [] if self._prefix is None else self._prefix.take_failures()

    @property
    def adapter(self) -> str:
        """The adapter that all rows share; "" for none."""
        return self._runner.get_active_lora_weights_name()

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that rows may ask for."""
        return self._runner.get_available_lora_weights()

    def switch_adapter(self, name: str) -> None:
        """Let the next rows run with an adapter, or "" none, while no row is active.

        Raises `adapter_unknown`, and `internal` where a row is active. `admit` does it by itself.
        """
        if self._context.any_live:
            raise HearthError("internal", "switch the adapter while no row is active", "adapter")
        self._runner.switch_lora_weights(name)

    def load_adapter(self, name: str, source: Path | Adapter) -> None:
        """Load an adapter from a folder, PEFT's or a stored one, or one that was read elsewhere.

        Rows go on. Raises `adapter_invalid`, `unsupported_option` where the engine takes none,
        `out_of_memory`, and `invalid_value` for a name that is taken.
        """
        self._runner.load_lora_weights(name, source)

    def load_adapters(self, folder: Path) -> dict[str, HearthError]:
        """Load all adapters of a folder; errors of those that cannot be served; `invalid_value`."""
        return load_all(folder, self.load_adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; raises `adapter_unknown`, and `internal` where rows run with it."""
        if name and name == self.adapter:
            self.switch_adapter("")
        self._runner.unload_lora_weights(name)

    def capture(
        self, batch_sizes: Sequence[int], progress: ProgressCallback = no_progress
    ) -> list[str]:
        """Capture prefill steps, and decode and verify steps of these batch sizes.

        No row is active. Returns the steps that could not be captured; raises `invalid_value` for a
        batch that is too large.
        """
        self._clear("capture")
        if not all(1 <= size <= self.max_batch for size in batch_sizes):
            what = f"a batch has 1 to {self.max_batch} rows"
            raise HearthError("invalid_value", what, "batch_sizes")
        progress("capturing", 0.0)
        self._runner.warm_prefill()
        kinds: list[Callable[[Sequence[int]], None]] = [self._vanilla.capture]
        if self._speculation is not None:
            kinds.append(self._speculation.capture)
        batches = decode_batches(self.config)
        sizes = sorted({next(one for one in batches if one >= size) for size in batch_sizes})
        for done, (capture, size) in enumerate(product(kinds, sizes), 1):
            capture([size])
            progress("capturing", done / (len(kinds) * len(sizes) + 1))
        self._runner.capture_prefill_graphs()
        progress("capturing", 1.0)
        return [one.reason for one in self.graphs.values() if one.failed_captures]

    def check_answer(self, answer: KnownAnswer) -> AnswerReport:
        """Force the engine through a known answer while no row is active.

        Raises `wrong_answer` where the engine gives another, and what a step raises.
        """
        self._clear("check the answer")
        self.switch_adapter("")
        return AnswerCheck(answer, self._runner, self._vanilla.sampler).run()

    def handle_request(
        self, request: GenerationRequest, tokenizer: Tokenizer | None = None
    ) -> GenerationResponse:
        """Generate for rows that run together, while no other row is active.

        Without a tokenizer there is no text and no stop string.
        """
        self._clear("take a whole request")
        return complete(self, request, tokenizer)

    @property
    def active(self) -> bool:
        """True if a row goes on, or a picture waits for the vision encoder."""
        return self._context.any_live or bool(self._vision.pictures)

    @property
    def free(self) -> int:
        """Number of rows that can be admitted before the next step."""
        # A row admitted between a failure and its report would share it.
        for step in self._in_flight:
            if step.error is not None and step.rows and not all_left(step.rows):
                return 0
        return self._context.free

    @property
    def queue_by(self) -> float:
        """Monotonic time at which to queue the next step so that the device does not wait for it.

        Zero, for at once, where no step is queued, a verify step decides what is next, or a prompt
        or a picture goes on.
        """
        if not self._in_flight or self._context.joiners or self._vision.pictures:
            return 0.0
        last = self._in_flight[-1]
        return 0.0 if last.kind == "verify" else self._times.queue_by(last.host_s)

    def check(self, row: RowRequest) -> None:
        """Refuse a row that `admit` would refuse; the error names the field."""
        speculates, pins = self._speculation is not None, self._prefix is not None
        check_row(self.config, row, self.capacity, speculates=speculates, pins=pins)
        self._runner.get_lora_weights_digest(row.options.adapter)
        check_options(row.options, self.config.output_vocab_size)
        if row.options.grammar:
            require(FIELD)

    def admit(self, rows: Sequence[RowRequest], numbers: Sequence[int] | None = None) -> list[int]:
        """Take rows, which get their places before the next step, and give their numbers.

        Those are `numbers`, of which no active row has one, or count on. Refuses all, naming the
        field: places too few, one is not served or (`cache_full`) pinned, or they do not share an
        adapter with each other and with those that run. Waits for grammars.
        """
        if not 1 <= len(rows) <= self.free:
            what = f"{self.free} places are free, for {len(rows)} rows"
            raise HearthError("invalid_value", what, "rows")
        for row in rows:
            self.check(row)
        adapter = shared_adapter(rows, self.adapter if self._context.any_live else None)
        matchers = [self._matcher(row) for row in rows]
        self._runner.switch_lora_weights(adapter)
        if self._prefix is not None:
            for row in rows:
                if row.options.cache == "pin":
                    self._prefix.pin(row)
        admitted = self._context.admit(rows, numbers)
        for one, matcher in zip(admitted, matchers, strict=True):
            one.matcher = matcher
        self._times.admitted(admitted)
        return [one.number for one in admitted]

    def run_tower(self, work: TowerWork) -> None:
        """Take a picture for the tower, within the budget of prefill where rows decode.

        Raises `image_too_large`, and `internal` without a tower.
        """
        self._vision.add(work)

    def leave(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""
        self._context.leave(row)

    def release(self, row: int, *, paid: bool = False) -> list[int] | None:
        """Let a row leave that would go on: its tokens beyond the prompt; None if it stays.

        A row whose last token is being sampled ends by itself. With `paid` it stays until it has
        decoded for as long as its prefill took: elsewhere it pays that again, and without this long
        prompts that take turns would never get a token further.
        """
        return self._context.release(row, self._times.generation.seconds if paid else inf)

    def unpin(self, client: int) -> None:
        """Keep no longer what a client's rows have pinned in the prefix cache."""
        if self._prefix is not None:
            self._prefix.unpin(client)

    def step(self) -> StepResult:
        """Give the result of the next prefill chunk, decode or verify step, or call of the tower.

        Rows that ended have left, and new ones have their places, before a step is queued. A chunk
        that fails ends its own rows, which the result tells. Raises `executor_failed` or
        `device_lost` when the engine fails otherwise; all rows are lost then.
        """
        if not self.active:
            raise HearthError("internal", "no row is active: admit rows before a step")
        context, speculation, in_flight = self._context, self._speculation, self._in_flight
        try:
            while kind := self._next():
                self._decode_next = kind in ("prefill", "tower")
                step: AnyStep
                if kind == "tower":
                    step = self._vision.queue(decoding=context.decoding > 0)
                elif kind == "prefill":
                    step = self._prefill_step()
                    if step.error is not None:
                        return failed_chunk(step.rows, step.started, step.error)
                elif speculation is not None and kind == "verify":
                    step = speculation.verify_step(context)
                else:
                    step = self._vanilla.decode_step(context, known=not in_flight)
                    if speculation is not None:
                        speculation.follow(step)
                in_flight.append(step)
            return self._finish(in_flight.popleft())
        except BaseException:
            in_flight.clear()
            context.fail_all()
            self._vision.drop_all()
            if self._prefix is not None:
                self._prefix.abort()
            raise

    def close(self) -> None:
        """Drop the rows, captured graphs and the engine.

        What one of them raises does not keep the others back; `device_lost` is not raised again.
        """
        self._in_flight.clear()
        try:
            with ExitStack() as closing:
                closing.callback(self._runner.close)
                if self._speculation is not None:
                    closing.callback(self._speculation.proposer.close)
                if self.tower is not None:
                    closing.callback(self.tower.close)
                if self.grammars is not None:
                    closing.callback(self.grammars.close)
                if self._prefix is not None:
                    # First of all, while the memory is there.
                    closing.callback(self._prefix.close)
        except HearthError as error:
            if error.code != "device_lost":
                raise

    def _matcher(self, row: RowRequest) -> GrammarMatcher | None:
        """Return a matcher behind the tokens that a row has generated; None for no grammar."""
        grammar = row.options.grammar
        if not grammar or self.grammars is None:
            return None
        return self.grammars.matcher(grammar, row.token_ids[row.prompt_length :])

    def _clear(self, what: str) -> None:
        """Let rows that ended leave their places; raises `internal` where one is active."""
        if self.active:
            raise HearthError("internal", f"{what} while no row is active")
        if self._speculation is not None:
            self._speculation.drop(self._in_flight)
        self._arrange()
        self._in_flight.clear()

    def _next(self) -> StepKind | None:
        """Kind of the step to queue next, once all rows have their places; None for no step."""
        context, in_flight, speculation = self._context, self._in_flight, self._speculation
        if speculation is not None and in_flight and in_flight[0].kind == "verify":
            if not all_left(in_flight[0].rows):
                # Its tokens decide what is next.
                return None
            speculation.drop(in_flight)
        if len(in_flight) > self._device.steps_ahead or (in_flight and in_flight[-1].unpicked):
            return None
        if not context.stays:
            self._arrange()
        decoding, joining = context.decoding > 0, context.decoding < len(context.rows)
        turn = decoding and self._decode_next
        waiting = self._vision.pictures and not turn
        if waiting and self._vision.due(decoding=decoding, joining=joining):
            return "tower"
        if joining and not turn:
            return "prefill"
        if speculation is not None and decoding and speculation.wanted(context):
            # A tree needs every token to be known to the host: the queue runs empty first.
            return None if in_flight else "verify"
        return "decode" if decoding else None

    def _arrange(self) -> None:
        """Let rows that ended leave and new ones take their places, everywhere at once.

        With a prefix cache a row takes its place with what is known of it, and leaves with what it
        has computed saved.
        """
        context, prefix = self._context, self._prefix
        if context.stays:
            return
        unread = [
            pair for step in self._in_flight for pair in zip(step.rows, step.lengths, strict=True)
        ]
        if prefix is not None:
            prefix.leave(context.rows, unread)
            self._times.prefill.reused += prefix.look_up(context.coming)
        context.arrange(unread, max((step.padding for step in self._in_flight), default=0))
        if prefix is not None:
            prefix.fill(context.rows)

    def _prefill_step(self) -> AnyStep:
        """Queue the next chunk; one that fails has an error and the rows that it was for."""
        context, joiners, started = self._context, self._context.joiners, time.monotonic()
        self._vision.passed()
        prompts = [Prompt(row.filled, row.prompt_left) for row in joiners]
        chunk = self._prompts.choose(prompts, limited=context.decoding > 0)
        try:
            step = self._vanilla.prefill_step(context, chunk)
            if self._speculation is not None:
                self._speculation.follow(step)
            if self._prefix is not None:
                self._prefix.chunk(step, step.rows, step.first)
        except (HearthError, MemoryError) as error:
            return InFlightStep("prefill", joiners[: chunk.rows], None, started, 0.0, error=error)
        return step

    def _finish(self, step: AnyStep) -> StepResult:
        """Wait for the step that was queued first, but for those whose rows have all left."""
        while self._in_flight and all_left(step.rows):
            step = self._in_flight.popleft()
        if step.kind == "tower":
            pictures = self._vision.collect(step, self._times.began(step.started))
            return StepResult("tower", [], *self._times.record(step), pictures=pictures)
        speculation, prefix = self._speculation, self._prefix
        live = [row for row in step.rows if row.state is RowState.LIVE] if prefix else []
        try:
            if speculation is not None and step.kind == "verify":
                tokens = speculation.collect(step)
            else:
                tokens = self._vanilla.collect(step)
        except HearthError as error:
            if step.kind != "prefill":
                raise
            return failed_chunk(step.rows, step.started, error)
        if self._in_flight and self._in_flight[0].unpicked:
            # The device runs it meanwhile, up to its logits.
            self._vanilla.pick(self._in_flight[0])
        if prefix:
            prefix.collected(step, step.rows, live, chunk=step.kind == "prefill")
        if speculation is not None and step.kind == "verify":
            self._verify_ahead(speculation, step.rows)
        began, ended = self._record(step, tokens)
        result = StepResult(step.kind, tokens, began, ended, step.rounds)
        if step.kind == "prefill":
            result.slot_times, result.cached = self._times.first_tokens(step.rows, tokens)
        return result

    def _record(self, step: AnyStep, tokens: Sequence[RowToken]) -> tuple[float, float]:
        """Take note of a step that was collected just now; when it began and ended."""
        if self._speculation is not None and step.kind == "verify":
            self._speculation.record(step)
        given = len([token for token in tokens if token.error is None])
        began, ended = self._times.record(step, given)
        if step.kind == "prefill":
            self._prompts.record(step.computed, ended - began)
            if self._prefix is not None:
                self._prefix.computed(step.computed, ended - began)
        elif self._speculation is not None and step.kind == "decode":
            self._speculation.record_step(len(step.rows), ended - began)
        return began, ended

    def _verify_ahead(self, speculation: SpeculativeStrategy, rows: list[DecodingRow]) -> None:
        """Queue the next verify step of these rows before the last one is reported.

        Rows that leave can wait until their last tokens are handed over.
        """
        try:
            if self._device.steps_ahead and self._context.stays and self._next() == "verify":
                self._in_flight.append(speculation.verify_step(self._context))
        except Exception as error:  # noqa: BLE001 - collected tokens are reported first
            failed = InFlightStep("verify", rows, None, time.monotonic(), 0.0, error=error)
            self._in_flight.append(failed)
