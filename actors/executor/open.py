from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs
from numpy.typing import NDArray

from hearth.actors.addresses import CONTROL_LIMIT, WORK_LIMIT
from hearth.actors.arena import Arena
from hearth.actors.executor.actor import ExecutorActor, ExecutorTower
from hearth.actors.executor.vision_encoder_memory import VisionEncoderMemory
from hearth.actors.mailbox import MailboxFull, Receiver, Sender
from hearth.actors.messages import ExecutorControl, ExecutorLimits, ExecutorMessage
from hearth.actors.roles import ExecutorSettings, Host, ReadyActor
from hearth.actors.supervisor_messages import ActorLoading
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.engine_folder import check_identity
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import EmbeddedImage
from hearth.runtime.loading import ProgressCallback, Stage, no_progress
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.tower_answer import check_tower_answer
from hearth.runtime.undo import undoing
from hearth.runtime.vision_config import VISION_FOLDER
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager, answer_of


class ArenaEmbeddings:
    """Embeddings of images in a shared arena, as the runtime of one engine reads them."""

    def __init__(self, arena: Arena, config: LLMEngineRunnerConfig) -> None:
        self._arena = arena
        self._dtype = numpy_dtype(config.dtype)
        self._features, self._width = 1 + config.num_deepstack_features, config.hidden_size

    def read(self, image: EmbeddedImage) -> NDArray[Any]:
        """A view of an image's embeddings; raises `internal` for a slot that has been reused."""
        shape = (self._features, image.tokens, self._width)
        return self._arena.array(image.slot, shape, self._dtype)


_FLUSH_S = 2.0
_TOLD_S = 0.25
_log = structlog.get_logger("executor")


def open_executor(host: Host, settings: ExecutorSettings) -> ReadyActor:
    """Open the engine, capture its graphs and run real steps; raises HearthError."""
    started = time.monotonic()
    runtime = open_runtime(settings, _LoadingReport(host))
    addresses, context = host.addresses, host.context
    actor = ExecutorActor(
        name=host.name,
        incarnation=addresses.incarnation,
        inbox=Receiver(context, [addresses.work], ExecutorMessage, WORK_LIMIT),
        control=Receiver(context, [addresses.control], ExecutorControl, CONTROL_LIMIT),
        to_tokenizer=Sender(context, addresses.tokenizer, WORK_LIMIT, _FLUSH_S),
        to_supervisor=host.to_supervisor,
        runtime=runtime,
        tower=_tower(runtime, settings),
        ask=_asking(runtime, settings),
    )

    def run() -> None:
        try:
            actor.run()
        finally:
            runtime.close()

    facts = _facts(runtime) | _weights(runtime, settings)
    facts |= {"load_s": round(time.monotonic() - started, 3)}
    return ReadyActor(run, facts, _limits(runtime), _adapters(runtime))


class _LoadingReport:
    """Reporter of loading to the supervisor: every new stage, and progress a few times a second."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._stage = ""
        self._due = self._compiling_since = 0.0

    def __call__(self, stage: Stage, share: float | None) -> None:
        now = self._clock()
        if stage == self._stage and now < self._due:
            return
        if stage != self._stage:
            self._log_compiling(stage, now)
        self._stage, self._due = stage, now + _TOLD_S
        # A supervisor that is behind gets the next report.
        with suppress(MailboxFull):
            self._host.to_supervisor.post(ActorLoading(self._host.name, stage, share))

    def _log_compiling(self, stage: Stage, now: float) -> None:
        if stage == "compiling":
            self._compiling_since = now
            _log.info("kernels are compiled for this GPU and kept: later starts find them")
        elif self._stage == "compiling":
            _log.info("the kernels are compiled", seconds=round(now - self._compiling_since, 3))


def open_runtime(
    settings: ExecutorSettings, progress: ProgressCallback = no_progress
) -> LLMInferenceRuntime:
    """Open a runtime, capture its steps and check its answer; raises HearthError."""
    check_identity(Path(settings.engine), settings.identity)
    runtime = LLMInferenceRuntime.open(
        Path(settings.engine), settings.options, progress, _embeddings(settings)
    )
    with undoing() as undo:
        undo.callback(runtime.close)
        if outdated := runtime.config.outdated:
            _log.warning("the engine folder is of an older form", reason=outdated)
        if (loaded := runtime.loaded_weights) is not None:
            speed = round(loaded.nbytes / loaded.seconds / 1e9, 2)
            _log.info("the weights are loaded", bytes=loaded.nbytes, gigabytes_a_second=speed)
        for reason in runtime.capture(range(1, runtime.max_batch + 1), progress):
            _log.warning("steps are slower than they could be", reason=reason)
        progress("answering", None)
        _warm_up(runtime)
        _check_answer(runtime, settings)
    return runtime


def _embeddings(settings: ExecutorSettings) -> ArenaEmbeddings | None:
    if (shared := settings.embeddings) is None:
        return None
    arena = Arena.open(shared.descriptor, shared.size)
    return ArenaEmbeddings(arena, load_config(Path(settings.engine)))


def _tower(runtime: LLMInferenceRuntime, settings: ExecutorSettings) -> ExecutorTower | None:
    patches, embeddings = settings.patches, settings.embeddings
    if runtime.tower is None or patches is None or embeddings is None:
        return None
    arenas = (Arena.open(one.descriptor, one.size) for one in (patches, embeddings))
    return ExecutorTower(VisionEncoderMemory(runtime.tower.config, *arenas))


def _warm_up(runtime: LLMInferenceRuntime) -> None:
    """Run a prefill and a decode step; raises HearthError if they fail."""
    options = RequestOptions(max_tokens=2, ignore_eos=True, cache="bypass")
    runtime.admit([RowRequest(token_ids=[0], prompt_length=1, options=options)])
    while runtime.active:
        result = runtime.step()
        if result.failure is not None:
            raise result.failure
        if any(token.error is not None for token in result.tokens):
            raise HearthError(
                "engine_corrupt",
                "the engine's first step gave no finite numbers: export the model again",
                "engine",
            )


def _check_answer(runtime: LLMInferenceRuntime, settings: ExecutorSettings) -> None:
    """Check the known answers of the engine and of its vision encoder, as far as it has them."""
    ask = _asking(runtime, settings)
    if ask is not None:
        ask()
        if runtime.tower is not None:
            given = check_tower_answer(runtime.tower, Path(settings.engine) / VISION_FOLDER)
            _log.info("the vision tower's known answer is right", **structs.asdict(given))
    elif not settings.options.verify:
        _log.warning("the known answer is not compared", reason="verify is off")
    else:
        simulated = runtime.config.backend == "simulated"
        reason = "the engine is simulated" if simulated else "the engine folder has none"
        _log.info("no known answer to compare with", reason=reason)


def _asking(runtime: LLMInferenceRuntime, settings: ExecutorSettings) -> Callable[[], None] | None:
    """A check of the known answer, which raises `wrong_answer`; None if there is none."""
    answer = answer_of(Path(settings.engine), runtime.config, settings.options.weights)
    if answer is None or not settings.options.verify:
        return None

    def ask() -> None:
        report = runtime.check_answer(answer)
        _log.info("the known answer is right", **structs.asdict(report), meaning=report.meaning)

    return ask


def _adapters(runtime: LLMInferenceRuntime) -> dict[str, str]:
    """The adapters that were found, each with the reason why it is not served, or ""."""
    refused = {name: error.message for name, error in runtime.refused_adapters.items()}
    for name, reason in refused.items():
        _log.warning("an adapter is not served", adapter=name, reason=reason)
    return dict.fromkeys(runtime.adapters, "") | refused


def _limits(runtime: LLMInferenceRuntime) -> ExecutorLimits:
    # A row generates one token at least, so the longest prompt leaves room for it.
    longest = min(runtime.config.max_supported_input_length, runtime.capacity - 1)
    return ExecutorLimits(runtime.max_batch, longest, runtime.capacity)


def _weights(runtime: LLMInferenceRuntime, settings: ExecutorSettings) -> dict[str, str]:
    """Source and digest of the external weights, if the engine has none itself."""
    given, folder = settings.options.weights, Path(settings.engine)
    weights = ExternalWeightManager.open(folder, runtime.config, given)
    return {} if weights is None else {"weights": weights.source, "weights_sha256": weights.digest}


def _facts(runtime: LLMInferenceRuntime) -> dict[str, str | int | float]:
    config = runtime.config
    facts: dict[str, str | int | float] = {
        "backend": config.backend,
        "dialect": config.dialect,
        "architecture": config.architecture,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.weight_quantization,
        "layers": config.num_decoder_layers,
        "vocab_size": config.vocab_size,
        "max_batch": runtime.max_batch,
        "capacity": runtime.capacity,
    }
    return facts | ({"chosen": runtime.chosen} if runtime.chosen else {})
