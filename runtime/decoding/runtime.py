import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from runtime.arrangement import RowOwner
from runtime.decoding.adapter_rows import AdapterRows
from runtime.decoding.answer_check import AnswerCheck, AnswerReport
from runtime.decoding.assembly import assemble
from runtime.decoding.batch_runtime import StepResult, failed_chunk
from runtime.decoding.budget import fit_deployment
from runtime.decoding.capture import capture_steps
from runtime.decoding.completion import complete
from runtime.decoding.counters import RuntimeCounters
from runtime.decoding.deployment import DeploymentConfig, load_engines
from runtime.decoding.limits import check_row
from runtime.decoding.pace import Pace
from runtime.decoding.predicted import predict_memory
from runtime.decoding.seating import Seating
from runtime.decoding.speculative import FailedRound, PendingRound, SpeculativeStrategy, stands
from runtime.decoding.tower_turns import PendingTower, TowerTurns, TowerWork
from runtime.decoding.vanilla import PendingStep, VanillaStrategy
from runtime.device.device import BatchSampler, Device
from runtime.device.open import open_device
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.errors import HearthError
from runtime.executor.engine import EngineOptions
from runtime.executor.engine_executor import EngineExecutor
from runtime.images import EmbeddingStore
from runtime.known_answer import KnownAnswer
from runtime.loading import Told, nobody
from runtime.memory.system import available_memory
from runtime.options import RuntimeOptions
from runtime.prefix.prefix_cache import PrefixCache
from runtime.request import GenerationRequest, GenerationResponse, RowRequest, check_options
from runtime.rows import DecodingInferenceContext, RowState, all_left
from runtime.steps.engine_runner import LLMEngineRunner
from runtime.text import Tokenizer
from runtime.undo import undoing
from runtime.vision.vision_runner import VisionRunner


class LLMInferenceRuntime(AdapterRows, RuntimeCounters):
    """Generates for rows that join and leave between two steps: admit, step while any is active.

    It belongs to one thread. Decode steps, or rounds of speculation, are of all rows whose prompts
    are done, and take turns with chunks of prompt of the others. On a device that works beside the
    host, a step is queued before the tokens of the step before are read; what only the host can
    decide then takes effect a step later, and the token that was picked too many is dropped.
    """

    def __init__(
        self,
        runner: LLMEngineRunner,
        device: Device,
        sampler: BatchSampler,
        speculation: SpeculativeStrategy | None = None,
        *,
        tower: VisionRunner | None = None,
        prefix: PrefixCache | None = None,
        prefill_budget: float = 1.0,
    ) -> None:
        self.config = config = runner.get_engine_config()
        self.max_batch = config.max_supported_batch_size
        self.speculation_metrics = EagleGenerationMetrics()
        self.refused_adapters: dict[str, HearthError] = {}
        """Those that could not be loaded with the engine, and why."""
        owners: list[RowOwner] = [*runner.row_owners, sampler]
        room = 1
        if speculation is not None:
            self.speculation_metrics = speculation.metrics
            owners.append(speculation.proposer)
            room = speculation.proposer.room
        self.chosen = ""
        """Why batch and capacity are smaller than exported, where nobody asked for that."""
        self.memory: dict[str, int] = {}
        self.loaded_weights = runner.loaded_weights
        self._runner = runner
        self._device = device
        self._sampler = sampler
        self._strategy = VanillaStrategy(runner, sampler)
        self.tower = tower
        """The vision tower, on a GPU; on the CPU whoever wants one opens it."""
        self._turns = TowerTurns(tower, device, prefill_budget, runner.multimodal_metrics)
        self._speculation = speculation
        self._context = DecodingInferenceContext(config, room)
        self.capacity = self._context.capacity
        """Tokens that a row holds."""
        self._pace = Pace(config, prefill_budget, speculation, self._turns)
        self.prefill_metrics = self._pace.prefill_metrics
        self.generation_metrics = self._pace.generation_metrics
        self._prefix = prefix
        self._seating = Seating(self._context, owners, prefix, self.prefill_metrics)
        self._queued: deque[PendingStep | PendingTower] = deque()
        self._round: PendingRound | None = None
        self._decode_next = False

    @classmethod
    def open(
        cls,
        folder: Path,
        options: RuntimeOptions | None = None,
        told: Told = nobody,
        embeddings: EmbeddingStore | None = None,
    ) -> "LLMInferenceRuntime":
        """Open an engine folder, with as many rows and as much capacity as fit where none is asked.

        Embeddings of images that rows name are read from `embeddings`. Raises `engine_*`,
        `out_of_memory` or `invalid_value`.
        """
        options = options or RuntimeOptions()
        engine = EngineOptions(threads=options.threads, spin=options.spin, told=told)
        engines = load_engines(folder, options, told)
        told("opening", None)
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
        config = deployment.base
        device = open_device(config.device) if device is None else device
        with undoing() as undo:
            undo.callback(device.close)
            parts = assemble(deployment, folder, options, device, embeddings=embeddings)
            budget = deployment.prefill_budget
            runtime = cls(*parts[:4], tower=parts.tower, prefix=parts.prefix, prefill_budget=budget)
        runtime.chosen, runtime.memory = deployment.chosen, predict_memory(deployment).device
        return runtime

    @property
    def executor(self) -> EngineExecutor:
        """That of the base's engine, for introspection."""
        return self._runner.executor

    @property
    def active(self) -> bool:
        """Whether a row goes on, or a picture waits for the tower."""
        return self._context.any_live or self._turns.waits

    @property
    def free(self) -> int:
        """How many rows can take places before the next step."""
        return 0 if stands(self._round) else self._context.free

    @property
    def queue_by(self) -> float:
        """When the next step is to be queued so that the device does not wait for it.

        That is at once where no step is queued, or where a prompt or a picture goes on.
        """
        if not self._queued or self._context.joiners or self._turns.waits:
            return 0.0
        return self._pace.queue_by(self._queued[-1].host_s)

    def check(self, row: RowRequest) -> None:
        """Refuse a row that `admit` would refuse; the error names the field."""
        check_row(self.config, row, self.capacity)
        if row.options.speculation and self._speculation is None:
            raise HearthError(
                "unsupported_option",
                "this engine runs without speculation: leave it to the daemon",
                "speculation",
            )
        self._check_adapter(row.options.adapter)
        if row.options.cache == "pin" and self._prefix is None:
            raise HearthError("unsupported_option", "there is no prefix cache to pin to", "cache")
        check_options(row.options, self.config.output_vocab_size)

    def admit(self, rows: Sequence[RowRequest]) -> list[int]:
        """Take rows, which get their places before the next step, and give their numbers.

        Refuses all, naming the field: places too few, one is not served or (`cache_full`) pinned.
        """
        if not 1 <= len(rows) <= self.free:
            raise HearthError(
                "invalid_value", f"{self.free} places are free, for {len(rows)} rows", "rows"
            )
        for row in rows:
            self.check(row)
        self._take_adapter({row.options.adapter for row in rows})
        self._seating.pin(rows)
        return self._context.admit(rows)

    def run_tower(self, work: TowerWork) -> None:
        """Take a picture for the tower, within the budget of prefill where rows decode.

        Raises `image_too_large`, and `internal` without a tower.
        """
        self._turns.add(work)

    def step(self) -> StepResult:
        """Give the result of the next prefill chunk, decode step, round or call of the tower.

        Rows that ended have left, and new ones have their places, before a step is queued. A chunk
        that fails ends its own rows, which the result tells. Raises `executor_failed` or
        `device_lost` when the engine fails otherwise; all rows are lost then.
        """
        if not self.active:
            raise HearthError("internal", "no row is active: admit rows before a step")
        context, speculation, queued = self._context, self._speculation, self._queued
        try:
            if (pending := self._in_flight()) is not None:
                return self._end_round(pending)
            while len(queued) <= self._device.steps_ahead and (kind := self._next()):
                self._decode_next = kind in ("prefill", "tower")
                if kind == "prefill":
                    self._turns.passed()
                    if (failed := self._prefill()) is not None:
                        return failed
                elif kind == "tower":
                    queued.append(self._turns.queue(decoding=context.decoding > 0))
                elif speculation is not None and kind == "round":
                    return self._end_round(speculation.round(context))
                else:
                    queued.append(following := self._strategy.decode_step(context))
                    if speculation is not None:
                        speculation.follow(following)
            return self._collect(self._oldest())
        except BaseException:
            queued.clear()
            self._round = None
            context.fail_all()
            self._seating.give_up()
            self._turns.drop_all()
            raise

    def leave(self, row: int) -> None:
        """Let a row leave before the next step; nothing more is reported for it."""
        self._context.leave(row)

    def unpin(self, client: int) -> None:
        """Keep no longer what a client's rows have pinned in the prefix cache."""
        self._seating.unpin(client)

    def release(self, row: int) -> list[int] | None:
        """Let a row leave that would go on: its tokens beyond the prompt; None if it has ended.

        A row whose last token is being picked ends by itself.
        """
        return self._context.release(row)

    def capture(self, batch_sizes: Sequence[int], told: Told = nobody) -> list[str]:
        """Capture prefill steps, and decode and speculation steps of these batch sizes.

        No row is active. Tells what makes steps slower than they could be.
        """
        self._clear("capture")
        return capture_steps(self._runner, self._strategy, self._speculation, batch_sizes, told)

    def check_answer(self, answer: KnownAnswer) -> AnswerReport:
        """Force the engine through a known answer while no row is active.

        Raises `wrong_answer` where the engine gives another, and what a step raises.
        """
        self._clear("check the answer")
        self.switch_adapter("")
        return AnswerCheck(answer, self._runner, self._sampler).run()

    def handle_request(
        self, request: GenerationRequest, tokenizer: Tokenizer | None = None
    ) -> GenerationResponse:
        """Generate for rows that run together, while no other row is active.

        Without a tokenizer there is no text and no stop string.
        """
        self._clear("take a whole request")
        return complete(self, request, tokenizer)

    def close(self) -> None:
        """Drop the rows, captured graphs and the engine.

        What one of them raises does not keep the others back; `device_lost` is not raised again.
        """
        self._queued.clear()
        self._round = None
        try:
            with ExitStack() as closing:
                closing.callback(self._runner.close)
                if self._speculation is not None:
                    closing.callback(self._speculation.proposer.close)
                if self.tower is not None:
                    closing.callback(self.tower.close)
                # First of all, while the memory is there.
                closing.callback(self._seating.close)
        except HearthError as error:
            if error.code != "device_lost":
                raise

    def _clear(self, what: str) -> None:
        """Let rows that ended leave their places; raises `internal` where one is active."""
        if self.active:
            raise HearthError("internal", f"{what} while no row is active")
        self._drop_round()
        self._seating.arrange(self._queued)
        self._queued.clear()

    def _in_flight(self) -> PendingRound | None:
        """The round that was queued ahead, if any of its rows is still there."""
        if self._round is not None and all_left(self._round.rows):
            self._drop_round()
        return self._round

    def _drop_round(self) -> None:
        """Let a round end whose rows have all left: nobody knows when it did, so nothing counts."""
        pending, self._round = self._round, None
        if pending is not None:
            pending.drop()

    def _end_round(self, pending: PendingRound) -> StepResult:
        """Wait for a round, and queue the next one before anything is told of it."""
        self._round = None
        live = [row for row in pending.rows if row.state is RowState.LIVE]
        tokens = pending.collect()
        cached = self._seating.collected(pending, live, tokens)
        # Rows that leave can wait until their last tokens are handed over.
        ahead = self._device.steps_ahead > 0 and self._context.stays
        try:
            if ahead and self._speculation is not None and self._next() == "round":
                self._round = self._speculation.round(self._context)
        except Exception as error:  # noqa: BLE001 - what was collected is told first
            self._round = FailedRound(pending.rows, error)
        pending.count()
        times = self._pace.record(pending, tokens)
        return StepResult("verify", tokens, *times, pending.rounds, cached=cached)

    def _oldest(self) -> PendingStep | PendingTower:
        """The step that was queued first, but for those whose rows have all left."""
        step, queued = self._queued.popleft(), self._queued
        while queued and all_left(step.rows):
            step = queued.popleft()
        return step

    def _next(self) -> Literal["prefill", "decode", "round", "tower"] | None:
        """What to queue next, once all rows have their places; None for nothing."""
        goes_on, context = self._seating.arrange(self._queued), self._context
        speculation = self._speculation
        decoding, joining = context.decoding > 0, bool(context.joiners)
        turn = decoding and self._decode_next
        towers = self.tower is not None and not turn
        if towers and self._turns.due(decoding=decoding, joining=joining):
            return "tower"
        if not goes_on:
            return None
        if joining and not turn:
            return "prefill"
        if speculation is not None and speculation.wanted(context):
            # A round needs every token to be known to the host: the queue runs empty first.
            return None if self._queued else "round"
        return "decode"

    def _prefill(self) -> StepResult | None:
        """Queue the next chunk; where that fails, what it reports for its rows."""
        context, joiners, started = self._context, self._context.joiners, time.monotonic()
        chunk = self._pace.chunk(joiners, limited=context.decoding > 0)
        try:
            pending = self._strategy.prefill_step(context, chunk)
            if self._speculation is not None:
                self._speculation.follow(pending)
            self._seating.prefilled(pending)
        except (HearthError, MemoryError) as error:
            return failed_chunk(joiners[: chunk.rows], started, error)
        self._queued.append(pending)
        return None

    def _collect(self, step: PendingStep | PendingTower) -> StepResult:
        """Wait for a step and take note of its time."""
        if isinstance(step, PendingTower):
            began = self._pace.began(step.started)
            pictures = self._turns.collect(step, began)
            return StepResult("tower", [], began, self._pace.ended(), pictures=pictures)
        live = [row for row in step.rows if row.state is RowState.LIVE]
        try:
            tokens = step.collect()
        except HearthError as error:
            if step.kind != "prefill":
                raise
            return failed_chunk(step.rows, step.started, error)
        cached = self._seating.collected(step, live, tokens)
        began, ended = self._pace.record(step, tokens)
        if step.kind == "prefill":
            self._seating.computed(step.computed, ended - began)
        return StepResult(step.kind, tokens, began, ended, step.rounds, cached=cached)
